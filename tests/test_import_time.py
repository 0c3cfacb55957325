"""Importing memo_hf costs next to nothing beside torch and transformers, and leaves CUDA alone."""

import json
import subprocess
import sys

import memo_hf

LIMIT_SECONDS = 0.2
# CPU time of this process, so that other work on the machine does not count.
PROBE = """
import json, sys, time
import torch, transformers
for name in {warm}:
    __import__(name)
start = time.process_time()
import memo_hf
config_class = memo_hf.MemoConfig
for name in {names}:
    getattr(memo_hf, name)
seconds = time.process_time() - start
print(json.dumps([seconds, torch.cuda.is_initialized()]))
"""


def probe(names=(), warm=()):
    code = PROBE.format(names=list(names), warm=list(warm))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def best_seconds(**kwargs):
    """The quickest of at most three runs; the first one under the limit suffices."""
    best = float("inf")
    for _ in range(3):
        seconds, cuda_initialised = probe(**kwargs)
        assert not cuda_initialised  # case 98
        best = min(best, seconds)
        if best <= LIMIT_SECONDS:
            break
    return best


def test_config_alone():
    assert best_seconds() <= LIMIT_SECONDS


def test_every_public_name():
    """accelerate's and transformers' own trainer modules are what a user of those names imports anyway."""
    warm = ["accelerate", "transformers.trainer", "transformers.modeling_utils"]
    assert best_seconds(names=memo_hf.__all__, warm=warm) <= LIMIT_SECONDS


def test_planning_names_do_not_load_torch():
    code = "import sys, memo_hf; memo_hf.MemoConfig(); memo_hf.forecast; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_everything_together_leaves_cuda_uninitialised():
    """# case 98: an allocator can be set only before CUDA is touched, so no import may touch it."""
    code = "import memo_hf, transformers, accelerate, trl, torch; from memo_hf.allocator import meter, native\n"
    code += "print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
