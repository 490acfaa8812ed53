"""One axis, spread over devices and processes: the numbers stay what they were."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import swindles
from swindles import scale, targets
from swindles.accuracy import empty_moments
from swindles.coupling import Total

FOLDER = Path(__file__).parent
COUNTS = (1, 2, 4, 8)
# Errors of one estimate, in units of which two may differ.
APART = 1e-3


# What compiles in less time.
QUICKLY = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false",
}


@pytest.fixture(scope="module")
def found():
    """What one process with eight devices found."""
    environment = os.environ | QUICKLY
    command = [sys.executable, FOLDER / "eight_devices.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["cva", "stein"])
def test_estimates_are_the_same_on_any_number_of_devices(found, scheme):
    one, *others = (np.array(each) for each in found["estimates"][scheme])
    for other in others:
        assert (np.abs(other - one) <= APART * one[1]).all()


@pytest.mark.slow
def test_every_chain_has_its_key_wherever_it_is(found):
    """Compared with keys that are split by JAX alone, to the bit."""
    assert found["draws"] == [True] * len(COUNTS)


@pytest.mark.slow
def test_marginal_chains_on_eight_devices_are_those_of_blackjax(found):
    assert found["trace"] < 1e-12


@pytest.mark.slow
def test_tuning_and_points_are_spread_too(found):
    one, eight = found["tuned"]
    assert one == pytest.approx(eight, rel=1e-3)
    one, eight = found["points"]
    assert one == eight and len(set(one)) > 200


@pytest.mark.slow
def test_sums_of_ones_own_are_right_too(found):
    one, eight = found["own"]
    assert one["steps"] == eight["steps"] == [5, 5]
    assert np.allclose(one["x"], eight["x"], rtol=1e-5)


@pytest.mark.slow
def test_a_block_has_no_collective_but_at_its_end(found):
    """The third one, with unknown sums, shows that others would be found."""
    assert found["collectives"]["cva"] == {"end": 0, "elsewhere": 0}
    stein = found["collectives"]["stein"]
    assert stein["end"] > 0 and stein["elsewhere"] == 0
    assert found["collectives"]["own"]["elsewhere"] > 0


@pytest.mark.slow
def test_blocks_lower_for_eight_gpus(found):
    assert found["cuda"] == [[8, True]] * 2


@pytest.mark.slow
def test_memory_of_a_device_falls(found):
    """As the compiler tells it: D = 501, 4096 chains."""
    one, eight = found["memory"]
    assert eight < 1.1 * one / 8


@pytest.mark.slow
def test_words(found):
    words, even = found["refused"]
    assert "100 chains" in words and "take 96 or 112" in words and even == 128
    assert found["default"] == [[1, 8, 8], 128, 144]
    assert (
        "right after" in found["too late"] and "NUM_CPU_DEVICES=5" in found["too late"]
    )


def test_one_device_is_left_alone():
    assert scale.chain_mesh(4096) is None and scale.row_mesh(4096, 64) is None
    tree = {"x": np.ones(3)}
    assert scale.put_chains(None, tree) is tree
    assert scale.fetch(tree)["x"] is tree["x"]
    with (
        pytest.raises(ValueError, match="there are 1 devices, not 2"),
        scale.use_devices(2),
    ):
        pass


def test_rules_follow_the_leaves():
    moments = empty_moments(np.zeros(3), 5)
    assert scale.sum_rules(moments) == ["same", "same", -2, -2]
    assert scale.sum_rules({"b": moments, "a": ()}) == ["same", "same", -2, -2]
    assert scale.sum_rules(Total(np.zeros(3))) is None
    assert scale.sum_rules((moments, np.zeros(5))) is None
    assert scale.sum_rules(()) == []


def test_cores_when_it_is_too_late():
    assert swindles.use_cores(1) == 1  # as many as there are
    with pytest.raises(RuntimeError, match="JAX has already started with 1 device"):
        swindles.use_cores(7)


PAGE = FOLDER.parent / "book" / "scale.md"
LISTING = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Where processes find what others have compiled; Make names a place, too."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return QUICKLY | {
        "JAX_COMPILATION_CACHE_DIR": folder or str(tmp_path_factory.mktemp("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def begin(folder, text, processes, programs):
    """Start the script of the page so many times: processes that have just begun."""
    (folder / "two.py").write_text(text)
    port, started = free_port(), []
    for i in range(processes):
        who = [f"localhost:{port}", str(processes), str(i)] if processes > 1 else []
        started.append(
            subprocess.Popen(
                [sys.executable, "two.py", *who],
                cwd=folder,
                env=os.environ | programs,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def finish(started):
    """What processes have printed when they are through; Gloo talks, too."""
    said = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), said
    return [re.sub(r"\[Gloo\].*\n", "", out) for out, _ in said]


def skewed_means(file, scheme=None) -> str:
    """The script of the page in this process, on one device: its report."""
    options = {"relative": 0.002, "seconds": None, "scheme": scheme, "file": file}
    return str(swindles.estimate(targets.skewed(5), **options))


def table(text: str) -> list[str]:
    """The lines of a report's table."""
    return [line for line in text.splitlines() if re.match(r"x\[", line)]


@pytest.mark.slow
def test_two_processes_with_two_devices_say_the_same(tmp_path, programs):
    """The script of the page; one of them prints, and writes."""
    first, second = finish(begin(tmp_path, LISTING, 2, programs))
    assert second == "" and "importance" in first
    assert {path.name for path in tmp_path.iterdir()} == {"run.npz", "two.py"}
    alone = skewed_means(tmp_path / "alone.npz")
    assert table(first) == table(alone) and len(table(first)) == 5


OFTEN = "import swindles.estimation\nswindles.estimation.SAVE_EVERY = 0\nreport ="


def chains_of(path) -> dict[str, np.ndarray]:
    """Sums and states of a saved run; nothing when there is none."""
    if not path.exists():
        return {}
    with np.load(path) as file:
        names = [name for name in file.files if name.startswith("run/")]
        head = json.loads(str(file["head"]))
        return {name: file[name] for name in names} | head["others"]


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other_and_the_run_goes_on(
    tmp_path, programs
):
    """Another number of processes takes it up, and comes to the same numbers."""
    alone = skewed_means(tmp_path / "alone.npz", "cva")
    text = LISTING.replace("relative=", 'scheme="cva", relative=')
    survivor, victim = begin(tmp_path, text.replace("report =", OFTEN), 2, programs)
    while chains_of(tmp_path / "run.npz").get("run/steps", 0) < 200:
        assert victim.poll() is None, victim.communicate()
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    _, words = survivor.communicate(timeout=60)
    victim.communicate()
    assert survivor.returncode != 0
    assert "lost another one" in words or "another task died" in words
    assert 200 <= chains_of(tmp_path / "run.npz")["run/steps"] < 1000
    resumed = skewed_means(tmp_path / "run.npz", "cva")
    assert table(resumed) == table(alone) and len(table(alone)) == 5
    mine, other = chains_of(tmp_path / "run.npz"), chains_of(tmp_path / "alone.npz")
    assert mine["run/steps"] == other["run/steps"] > 1000
    for name in (n for n in mine if n.startswith("run/")):
        assert np.allclose(mine[name], other[name], rtol=1e-9, atol=1e-12), name
