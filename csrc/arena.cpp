#include "arena.hpp"

#include <algorithm>
#include <cassert>

namespace memo {

Arena::~Arena() {
  forget(blocks_.begin(), blocks_.end());
  device_.free_arena(base_);
}

bool Arena::contains(const void* data) const {
  const auto address = reinterpret_cast<std::uintptr_t>(data), base = reinterpret_cast<std::uintptr_t>(base_);
  return address >= base && address - base < bytes_;
}

void* Arena::take(std::uint64_t offset, std::uint64_t bytes, Stream stream) {
  if (offset > bytes_ || bytes > bytes_ - offset) return nullptr;
  auto first = blocks_.lower_bound(offset);
  if (first != blocks_.begin()) {
    const auto before = std::prev(first);
    if (before->first + before->second.bytes > offset) first = before;
  }
  auto last = first;
  for (; last != blocks_.end() && last->first < offset + bytes; ++last) {
    if (last->second.live) return nullptr;
  }
  for (auto block = first; block != last; ++block) {
    for (Fence fence : block->second.fences) device_.wait(stream, fence);  // hazard: the other stream still uses it
  }
  forget(first, last);
  blocks_.emplace(offset, Block{bytes, stream});
  ++num_live_;
  return base_ + offset;
}

std::uint64_t Arena::give_back(const void* data) {
  const auto found = find(data);
  Block& block = found->second;
  const std::uint64_t bytes = block.bytes;
  block.live = false;
  --num_live_;
  if (block.outlived_change) device_.synchronize();  // hazard: no order between its stream and the next block's
  for (Stream other : block.other_streams) block.fences.push_back(device_.record(other));
  if (block.fences.empty()) blocks_.erase(found);
  return bytes;
}

void Arena::use(const void* data, Stream stream) {
  Block& block = find(data)->second;
  auto& others = block.other_streams;
  if (stream == block.stream || std::find(others.begin(), others.end(), stream) != others.end()) return;
  others.push_back(stream);
}

void Arena::change_streams() {
  for (auto& [offset, block] : blocks_) block.outlived_change = true;
}

Arena::Blocks::iterator Arena::find(const void* data) {
  const auto found = blocks_.find(static_cast<std::uint64_t>(static_cast<const char*>(data) - base_));
  assert(found != blocks_.end() && found->second.live);
  return found;
}

void Arena::forget(Blocks::iterator first, Blocks::iterator last) {
  for (auto block = first; block != last; ++block) {
    for (Fence fence : block->second.fences) device_.drop(fence);
  }
  blocks_.erase(first, last);
}

}  // namespace memo
