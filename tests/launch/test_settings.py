"""What a script sets above `spawn` holds in its workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faults import Script

import unisono
from unisono.devices import get_backend
from unisono.launch.settings import SETTINGS, Settings
from unisono.launch.spawn import spawn

# By the name of a setting: a line that sets it, and an expression that shows it.
HOW: dict[str, tuple[str, str]] = {
    "random.seed": ("random.seed(5)", "random.random()"),
    "numpy.random.seed": ("numpy.random.seed(5)", "numpy.random.rand()"),
    "warnings.filterwarnings": ("warnings.filterwarnings('error', category=Own)", "warned()"),
    "logging.captureWarnings": ("logging.captureWarnings(True)", "warnings.showwarning.__module__"),
    "logging.disable": ("logging.disable(5)", "logging.root.manager.disable"),
    "sys.setrecursionlimit": ("sys.setrecursionlimit(4321)", "sys.getrecursionlimit()"),
    "tempfile.tempdir": ("tempfile.tempdir = os.path.join(os.getcwd(), 'own')", "tempfile.gettempdir()"),
    "multiprocessing.set_start_method": (
        "multiprocessing.set_start_method('spawn', force=True)",
        "multiprocessing.get_start_method()",
    ),
    "torch.manual_seed": ("torch.manual_seed(5)", "torch.rand((), device='cpu').item()"),
    "torch.set_default_dtype": ("torch.set_default_dtype(torch.float64)", "torch.ones(1).dtype"),
    "torch.set_default_device": ("torch.set_default_device('meta')", "torch.ones(1).device.type"),
    "torch.use_deterministic_algorithms": (
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())",
    ),
    "torch.set_float32_matmul_precision": (
        "torch.set_float32_matmul_precision('high')",
        "torch.get_float32_matmul_precision()",
    ),
    "torch.backends.fp32_precision": (
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "torch.backends.cudnn.conv.fp32_precision",
    ),
    "torch.set_flush_denormal": (
        "torch.set_flush_denormal(True)",
        "(torch.tensor(1e-310, dtype=torch.float64, device='cpu') * 1).item() == 0.0",
    ),
    "torch.set_grad_enabled": ("torch.set_grad_enabled(False)", "torch.is_grad_enabled()"),
    "torch.inference_mode": ("held = torch.inference_mode(); held.__enter__()", "torch.is_inference_mode_enabled()"),
    "torch.autocast": (
        "torch.set_autocast_enabled('cpu', True); torch.set_autocast_dtype('cpu', torch.float16)",
        "(torch.ones(1, 1, device='cpu') @ torch.ones(1, 1, device='cpu')).dtype",
    ),
    "torch.autograd.set_detect_anomaly": ("torch.autograd.set_detect_anomaly(True)", "torch.is_anomaly_enabled()"),
    "torch.multiprocessing.set_sharing_strategy": (
        "torch.multiprocessing.set_sharing_strategy('file_system')",
        "torch.multiprocessing.get_sharing_strategy()",
    ),
}
NAMES = {"torch.backends.opt_einsum.strategy": "'optimal'", "torch.backends.quantized.engine": "'onednn'"}
for path in SETTINGS.keys() - HOW.keys():  # switches that are on or off
    if path.startswith("torch.backends.cuda.enable_"):
        is_on = f"torch.backends.cuda.{path.rpartition('.enable_')[2]}_enabled()"
        HOW[path] = (f"{path}(not {is_on})", is_on)
    else:
        HOW[path] = (f"{path} = {NAMES.get(path) or f'not {path}'}", path)

SCRIPT = """
import logging, multiprocessing, os, random, sys, tempfile, warnings
import numpy, torch, torch._dynamo
from unisono.launch.spawn import spawn

os.mkdir("own")

class Own(UserWarning):
    pass

def warned():
    try:
        warnings.warn("a warning", Own)
    except Own:
        return True
    return False

def show(index=0):
    used = (logging, multiprocessing, os, random, sys, tempfile, warnings, numpy, torch, torch._dynamo)
    used = (*used, warned)
    # Drawing comes last: what is drawn by others first does not matter then.
    return {{name: eval(shown) for name, (_, shown) in HOW.items()}}

HOW = {how!r}
before = show()
for change, _ in HOW.values():
    exec(change)
found = spawn(show, nprocs=2, start_method={method!r})
expected = show()
for name in HOW:
    assert before[name] != expected[name], (name, before[name])
    seen = [each[name] for each in found]
    assert seen == [expected[name]] * 2, (name, expected[name], seen)
print("done")
"""


@pytest.mark.parametrize("method", ["zygote", pytest.param("spawn", marks=pytest.mark.slow)])
def test_every_setting_holds_in_the_workers(tmp_path, method):
    with Script(SCRIPT.format(how=HOW, method=method), tmp_path) as running:
        code, output, errors = running.end()
        assert (code, output) == (0, "done\n"), errors


def test_every_setting_stands_in_the_table_of_the_guide():
    page = (Path(unisono.__file__).parents[1] / "docs/launching.md").read_text()
    assert [name for name in SETTINGS if f"`{name}`" not in page] == []


def test_every_setting_has_a_test():
    assert HOW.keys() == SETTINGS.keys()


STARTED = """
import sys
from unisono.launch.spawn import spawn

def look(index):
    return sys.warnoptions, sys._xoptions, tuple(sys.flags)

for method in "zygote", "spawn":
    if spawn(look, nprocs=2, start_method=method) != [look(0)] * 2:
        sys.exit(method)
"""


@pytest.mark.slow
def test_workers_are_started_with_the_flags_of_the_callers_interpreter(tmp_path):
    # Workers have `-P` in any case. Not `-O`, for which all of torch would be compiled once more.
    flags = ["-P", "-W", "error::ImportWarning", "-X", "utf8", "-X", "own=3", "-X", "dev", "-B"]
    done = subprocess.run([sys.executable, *flags, "-c", STARTED], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_setting_that_cannot_be_had_is_reported_once(monkeypatch, caplog):
    monkeypatch.setattr("unisono.launch.messages._said", set())
    monkeypatch.setitem(SETTINGS, "sys.setrecursionlimit", (lambda: -1, lambda value: None))
    for _ in range(2):
        spawn(lambda index: index, nprocs=2)
    told = [each for each in (record.getMessage() for record in caplog.records) if "sys.setrecursionlimit" in each]
    assert len(told) == 1
    assert told[0].startswith("workers do not have what sys.setrecursionlimit has set in the calling process (Value")


@pytest.mark.slow
def test_workers_draw_their_own_numpy_numbers_even_if_the_caller_drew_none(tmp_path):
    source = """
import sys
from unisono.launch.spawn import spawn

def draw(index):
    import numpy
    return numpy.random.rand()

assert "numpy.random" not in sys.modules
print(len({*spawn(draw, nprocs=2), *spawn(draw, nprocs=2)}))
"""
    with Script(source, tmp_path, "file") as running:
        assert running.end() == (0, "4\n", "")


LOGGING = """
import logging, logging.handlers, sys
from unisono.launch.spawn import spawn

class Mine(logging.Formatter):
    def format(self, record):
        return f"mine {record.getMessage()}"

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
file = logging.FileHandler("own.log", "w")
file.setFormatter(Mine())
logging.getLogger("own").addHandler(file)
logging.getLogger("silent").setLevel(logging.ERROR)
logging.getLogger("apart").propagate = False
logging.getLogger("rotated").addHandler(logging.handlers.RotatingFileHandler("rotated.log", delay=True))
logging.getLogger("unisono").setLevel(logging.ERROR)

def work(index):
    logging.info("info of %d", index)
    logging.debug("not shown")
    logging.getLogger("own").warning("kept")
    logging.getLogger("silent").warning("not shown")
    logging.getLogger("apart").info("not shown")

spawn(work, nprocs=2)
print(sorted(open("own.log").read().splitlines()))
"""


def test_workers_log_as_the_caller_does(tmp_path):
    with Script(LOGGING, tmp_path) as running:
        code, output, errors = running.end()
        assert (code, output) == (0, "['mine kept', 'mine kept']\n")
        lines = ["INFO root info of {}", "WARNING own kept"]
        assert sorted(errors.splitlines()) == sorted(
            f"[rank {rank}] {line.format(rank)}" for rank in range(2) for line in lines
        )


def test_the_caller_s_seed_reaches_the_generators_of_a_worker_s_gpus(monkeypatch):
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with torch.random.fork_rng(devices=[]):
        Settings({}, {}, 7).adopt(get_backend("cuda"))
    assert seeds == [7]
