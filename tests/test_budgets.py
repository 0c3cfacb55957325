"""Host and device budgets, read from fake machines."""

import pytest

from memo_hf.errors import HostMemoryError
from memo_hf.planner.budgets import device_budget_bytes, host_budget_bytes, read_host_memory

GIB = 2**30


def machine(root, available_gib, files=()):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_gib * 2**20} kB\n")
    for path, text in dict(files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(str(text))
    return root


def cgroup2(limit, used, folder="job", stat="inactive_file 0\n"):
    base = f"sys/fs/cgroup/{folder}"
    return {
        "proc/self/cgroup": f"0::/{folder}\n",
        f"{base}/memory.max": limit,
        f"{base}/memory.current": used,
        f"{base}/memory.stat": stat,
    }


def test_machine_without_cgroup(tmp_path):
    assert read_host_memory(machine(tmp_path, 10)).free_bytes == 10 * GIB


def test_cgroup_of_four_gib_limits_a_large_machine(tmp_path):
    memory = read_host_memory(machine(tmp_path, 64, cgroup2(4 * GIB, 1 * GIB)))
    assert memory.free_bytes == 3 * GIB
    assert "3.00 GiB of 4.00 GiB free" in memory.source


def test_cached_files_are_given_back(tmp_path):
    stat = f"anon 5\ninactive_file {GIB // 2}\n"
    assert read_host_memory(machine(tmp_path, 64, cgroup2(4 * GIB, GIB, stat=stat))).free_bytes == 3.5 * GIB


def test_a_parent_group_may_be_the_tighter_one(tmp_path):
    files = cgroup2("max", 0, folder="pod/job")
    files |= {"sys/fs/cgroup/pod/memory.max": 2 * GIB, "sys/fs/cgroup/pod/memory.current": GIB}
    assert read_host_memory(machine(tmp_path, 64, files)).free_bytes == GIB


def test_inside_a_container_the_own_path_is_not_there(tmp_path):
    files = {
        "proc/self/cgroup": "0::/kubepods/abc\n",
        "sys/fs/cgroup/memory.max": 4 * GIB,
        "sys/fs/cgroup/memory.current": GIB,
    }
    assert read_host_memory(machine(tmp_path, 64, files)).free_bytes == 3 * GIB


def test_version_one(tmp_path):
    base = "sys/fs/cgroup/memory/job"
    files = {
        "proc/self/cgroup": "7:cpu,cpuacct:/x\n5:memory:/job\n",
        f"{base}/memory.limit_in_bytes": 4 * GIB,
        f"{base}/memory.usage_in_bytes": 2 * GIB,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 5 * GIB,
    }
    assert read_host_memory(machine(tmp_path, 64, files)).free_bytes == 2 * GIB


def test_budget_is_shared_by_the_ranks_and_less_what_others_take(tmp_path):
    # cases 93, 94
    root = machine(tmp_path, 64, cgroup2(40 * GIB, 0))
    assert host_budget_bytes(local_ranks=4, other_bytes=4 * GIB, root=root) == 8 * GIB
    assert host_budget_bytes(20 * GIB, local_ranks=4, other_bytes=4 * GIB, root=root) == 4 * GIB


def test_nothing_left_says_what_to_do(tmp_path):
    with pytest.raises(HostMemoryError, match=r"3\.60 GiB may be used .* 8\.00 GiB are declared .* move the optimizer"):
        host_budget_bytes(other_bytes=8 * GIB, root=machine(tmp_path, 64, cgroup2(4 * GIB, 0)))


def test_unreadable_machine_says_what_to_do(tmp_path):
    with pytest.raises(HostMemoryError, match="set host_memory"):
        read_host_memory(tmp_path)


def test_this_machine_has_memory():
    assert read_host_memory().free_bytes > 0


def test_device_budget_keeps_a_margin():
    assert device_budget_bytes(70 * GIB, total_bytes=80 * GIB) == 66 * GIB
    assert device_budget_bytes(1 * GIB, total_bytes=80 * GIB) == 0
