#include "core.hpp"

#include <algorithm>
#include <stdexcept>

namespace memo {
namespace {

// How far ahead in its lane a request of another size than expected is looked for: so many requests may be left out at
// one place and the rest of the phase still finds its addresses. One too many is simply not found and moves nothing.
constexpr std::size_t kLookAhead = 16;

std::atomic<std::uint32_t> num_threads{0};
thread_local const std::uint32_t this_thread = num_threads++;

// Set by a thread's first mark. A data loader's or a copy thread's requests come at no fixed place in the step, so they
// must not move the cursor.
thread_local bool this_thread_is_planned = false;

}  // namespace

std::uint64_t Core::lane_key(std::uint32_t phase, std::uint32_t stream) {
  return (static_cast<std::uint64_t>(phase) << 32) | stream;
}

void* Core::allocate(std::uint64_t bytes, Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  void* const data = planned_address(bytes, stream);
  if (data != nullptr) {
    counts_.num_planned += 1;
    counts_.planned_bytes += bytes;
    counts_.planned_live_bytes += bytes;
    count_alloc(data, bytes, stream);
  }
  return data;
}

void* Core::planned_address(std::uint64_t bytes, Stream stream) {
  const std::uint32_t number = stream_number(stream);  // first of all: numbers are the same with a plan and without
  if (plan_ == nullptr || phase_ == MEMO_NO_PHASE || !this_thread_is_planned) {
    counts_.num_outside += 1;
    return nullptr;
  }
  const auto found = plan_->lanes.find(lane_key(phase_, number));
  if (found != plan_->lanes.end()) {
    Lane& lane = found->second;
    const std::size_t end = std::min(lane.requests.size(), lane.next + 1 + kLookAhead);
    for (std::size_t i = lane.next; i < end; ++i) {
      if (lane.requests[i].bytes != bytes) continue;
      lane.next = i + 1;
      void* const data = arena_->take(lane.requests[i].offset, bytes, stream);
      if (data == nullptr) {
        counts_.num_conflicts += 1;
        misses_[phase_] += 1;
      }
      return data;
    }
  }
  counts_.num_missed += 1;
  misses_[phase_] += 1;
  return nullptr;
}

void Core::note_dynamic(const void* data, std::uint64_t bytes, Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  counts_.dynamic_bytes += bytes;
  count_alloc(data, bytes, stream);
}

void Core::count_alloc(const void* data, std::uint64_t bytes, Stream stream) {
  counts_.num_allocs += 1;
  counts_.live_bytes += bytes;
  counts_.peak_bytes = std::max(counts_.peak_bytes, counts_.live_bytes);
  if (recording_ && events_.size() < max_events_) {
    recorded_[data] = num_recorded_;
    log(MEMO_EVENT_ALLOC, num_recorded_++, bytes, stream_number(stream));
  }
}

bool Core::free_planned(const void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  Arena* const arena = arena_of(data);
  if (arena == nullptr) return false;
  const std::uint64_t bytes = arena->give_back(data);
  counts_.planned_live_bytes -= bytes;
  count_free(data, bytes);
  if (arena->idle()) drop_idle_arenas();
  return true;
}

void Core::note_dynamic_free(const void* data, std::uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  count_free(data, bytes);
}

void Core::count_free(const void* data, std::uint64_t bytes) {
  counts_.num_frees += 1;
  counts_.live_bytes -= bytes;
  if (!recording_) return;
  const auto found = recorded_.find(data);
  if (found == recorded_.end()) return;  // made before the recording began
  log(MEMO_EVENT_FREE, found->second, 0, 0);
  recorded_.erase(found);
}

bool Core::use_on_stream(const void* data, Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Arena* const arena = arena_of(data);
  if (arena != nullptr) arena->use(data, stream);
  return arena != nullptr;
}

std::uint32_t Core::add_plan(const memo_planned_request* requests, std::size_t count, std::uint64_t arena_bytes) {
  auto plan = std::make_unique<Plan>(Plan{arena_bytes, true, {}, {}});
  std::map<std::uint32_t, std::pair<std::uint64_t, std::uint64_t>> ranges;  // of each stream: first and last address
  for (std::size_t i = 0; i < count; ++i) {
    const memo_planned_request& request = requests[i];
    const auto refuse = [i](const char* what) {
      throw std::invalid_argument("planned request " + std::to_string(i) + " " + what);
    };
    if (request.bytes == 0) refuse("has no bytes");
    if (request.phase == MEMO_NO_PHASE) refuse("belongs to no phase");
    if (request.offset % MEMO_ALIGNMENT != 0) refuse("is not aligned");
    if (request.offset > arena_bytes || request.bytes > arena_bytes - request.offset) refuse("ends behind the arena");
    const std::uint64_t end = request.offset + request.bytes;
    auto& range = ranges.try_emplace(request.stream, request.offset, end).first->second;
    range = {std::min(range.first, request.offset), std::max(range.second, end)};
    plan->lanes[lane_key(request.phase, request.stream)].requests.push_back(request);
  }
  // Work on two streams is not ordered, so that a range freed on one is not safe to give to the other.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> sorted;
  for (const auto& [stream, range] : ranges) {
    plan->streams.push_back(stream);
    sorted.push_back(range);
  }
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i].first < sorted[i - 1].second) throw std::invalid_argument("two streams share a range of the arena");
  }

  std::lock_guard<std::mutex> lock(mutex_);
  plans_.push_back(std::move(plan));
  return static_cast<std::uint32_t>(plans_.size() - 1);
}

void Core::clear_plans() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (last_plan_ != nullptr && last_plan_->streams.size() > 1) device_.synchronize();
  plan_ = nullptr;
  last_plan_ = nullptr;
  arena_ = nullptr;
  plans_.clear();
  misses_.clear();
  drop_idle_arenas();
}

void Core::retire_arena() {
  std::lock_guard<std::mutex> lock(mutex_);
  plan_ = nullptr;
  arena_ = nullptr;
  drop_idle_arenas();
}

bool Core::begin_step(std::uint32_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  phase_ = MEMO_NO_PHASE;
  plan_ = nullptr;
  log(MEMO_EVENT_STEP, 0, 0, 0);
  if (number >= plans_.size()) return number == MEMO_NO_PLAN;
  Plan* const plan = plans_[number].get();
  if (!make_room(*plan)) return false;
  // Hazard: ranges belong to other streams than in the last plan, whose work there may still be running.
  const bool one_stream = last_plan_ == nullptr || (plan->streams.size() == 1 && plan->streams == last_plan_->streams);
  if (last_plan_ != plan && !one_stream) {
    device_.synchronize();
    arena_->change_streams();
  }
  for (auto& [key, lane] : plan->lanes) lane.next = 0;
  plan_ = plan;
  last_plan_ = plan;
  return true;
}

void Core::mark(std::uint32_t phase) {
  std::lock_guard<std::mutex> lock(mutex_);
  this_thread_is_planned = true;
  phase_ = phase;
  log(MEMO_EVENT_MARK, 0, 0, 0);
}

void Core::end_step() {
  std::lock_guard<std::mutex> lock(mutex_);
  phase_ = MEMO_NO_PHASE;
  plan_ = nullptr;
  log(MEMO_EVENT_STEP, 0, 0, 0);
}

// What the device keeps of freed dynamic blocks serves further ones, and cannot serve an arena. It goes back
// - before an arena is made: that needs the room, and so it is where a plan was made again after many misses;
// - before the first step of a plan: the steps of its shape were dynamic until now, and their memory is not asked for
//   again. A longer shape's arena may be there already, so that none is made.
// After that the device keeps at most what dynamic requests have needed at one time since: those of the planned steps,
// which are few, and of whatever comes between, such as evaluation or a shape without a plan. The latter stays, as in a
// caching allocator: it comes again, and it was held beside the arena anyway while it was needed. Neither part is in
// the other's way: where a dynamic request finds no memory, the caller has an idle arena freed (release_idle).
bool Core::make_room(Plan& plan) {
  const bool fits = arena_ != nullptr && arena_->bytes() >= plan.arena_bytes;
  if (!fits) {
    arena_ = nullptr;
    drop_idle_arenas();
  }
  if (!fits || plan.is_new) device_.trim();
  plan.is_new = false;
  if (fits) return true;
  char* const base = device_.allocate_arena(plan.arena_bytes);
  if (base == nullptr) return false;
  arena_ = arenas_.emplace_back(std::make_unique<Arena>(device_, base, plan.arena_bytes)).get();
  counts_.arena_bytes += plan.arena_bytes;
  return true;
}

void Core::drop_idle_arenas() {
  std::erase_if(arenas_, [this](const std::unique_ptr<Arena>& arena) {
    const bool needed = !arena->idle() || arena.get() == arena_;
    if (!needed) counts_.arena_bytes -= arena->bytes();
    return !needed;
  });
}

void Core::release_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (plan_ == nullptr && arena_ != nullptr && arena_->idle()) arena_ = nullptr;
  drop_idle_arenas();
}

Arena* Core::arena_of(const void* data) {
  for (const auto& arena : arenas_) {
    if (arena->contains(data)) return arena.get();
  }
  return nullptr;
}

std::uint32_t Core::stream_number(Stream stream) {
  return streams_.try_emplace(stream, static_cast<std::uint32_t>(streams_.size())).first->second;
}

memo_statistics Core::statistics() {
  std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

std::uint64_t Core::take_peak() {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t peak = counts_.peak_bytes;
  counts_.peak_bytes = counts_.live_bytes;
  return peak;
}

std::map<std::uint32_t, std::uint64_t> Core::misses() {
  std::lock_guard<std::mutex> lock(mutex_);
  return misses_;
}

void Core::start_recording(std::size_t max_events) {
  std::lock_guard<std::mutex> lock(mutex_);
  events_.clear();
  recorded_.clear();
  num_recorded_ = 0;
  max_events_ = max_events;
  recording_ = true;
}

std::size_t Core::stop_recording() {
  std::lock_guard<std::mutex> lock(mutex_);
  recording_ = false;
  recorded_.clear();
  return events_.size();
}

void Core::read_events(memo_event* out, std::size_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::copy_n(events_.begin(), std::min(count, events_.size()), out);
  events_ = {};
}

void Core::log(std::uint32_t kind, std::uint64_t request, std::uint64_t bytes, std::uint32_t stream) {
  if (!recording_ || events_.size() >= max_events_) return;
  events_.push_back({request, bytes, kind, phase_, stream, this_thread});
}

}  // namespace memo
