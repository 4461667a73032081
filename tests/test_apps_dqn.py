"""The distributed DQN: the same on every backend, and not to be stopped."""

from __future__ import annotations

import copy
import hashlib
import io
import multiprocessing
import os
import re
import signal
import sys
import threading
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tqdm
from hypothesis import given
from hypothesis import strategies as st
from nng_links import nng_runs

import mq
from bench.apps.app import AppCell
from bench.apps.command import BACKENDS, measure
from bench.apps.dqn import crew as crew_module
from bench.apps.dqn import curves, watch
from bench.apps.dqn.cells import APP, Placed
from bench.apps.dqn.collector import collect
from bench.apps.dqn.crew import Crew
from bench.apps.dqn.games import Step, make
from bench.apps.dqn.learner import Learner
from bench.apps.dqn.replay import NStep, Replay, SumTree, pack
from bench.apps.dqn.task import CARTPOLE, PONG, Task, preset
from bench.apps.dqn.train import main, train
from bench.apps.dqn.training import Ledger, Training
from bench.peer import Metrics, Peer
from bench.runner import run_cell
from mq import registry

__all__ = ["nng_runs"]

CUDA = "torchrpc:cuda"
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason=registry.check(CUDA) or "no GPU"
)

STEPPED = Task(
    seed=3,
    steps=900,
    batch=16,
    replay=2000,
    prioritized=True,
    warmup=100,
    target_every=20,
    chunk=50,
    explore=600,
    in_step=True,
)


def in_step(peer: Peer) -> Metrics | None:
    """A short training in step: what came out of it, as numbers."""
    name = f"rank{peer.rank}"
    with mq.connect(peer.cell.transport, group=peer.group, name=name) as queue:
        if peer.rank:
            collect(queue, STEPPED, peer.rank - 1)
            return None
        learner = Learner(STEPPED)
        summary = Training(queue, STEPPED, learner).run()
    digest = hashlib.sha256()
    for tensor in learner.online.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return {
        "value": 1.0,
        "weights": float(int.from_bytes(digest.digest()[:6], "big")),
        "returns": sum(one for _, one in learner.returns),
        "iterations": float(learner.iteration),
        "lost": float(summary.lost),
    }


def stepped(backend: str) -> Metrics:
    cell = AppCell(backend, "in-step", 0, limit=90.0)
    threads = backend == "inproc"
    result = run_cell(cell, f"{__name__}:in_step", 3, threads=threads)
    assert result.status == "ok", f"{result.reason}\n{result.detail}"
    return result.metrics


@pytest.fixture(scope="module")
def expected() -> Metrics:
    """What threads of one process learn."""
    return stepped("inproc")


@pytest.mark.parametrize(
    "backend",
    [*BACKENDS, pytest.param(CUDA, marks=[pytest.mark.gpu, needs_gpu])],
)
def test_in_step_every_backend_learns_the_same(backend: str, expected: Metrics) -> None:
    """Bit by bit: the transport changes nothing, and a seed can be trusted."""
    found = stepped(backend)
    assert found == expected
    assert found["iterations"] > 100
    assert found["lost"] == 0


def freely(backend: str, task: Task, output: Path) -> Metrics:
    cell = APP.placed(
        AppCell(backend, f"dqn {task.game}", 0, limit=90.0, task=Placed(task)), output
    )
    result = measure(APP, cell, output)
    assert result.status == "ok", f"{result.reason}\n{result.detail}"
    return result.metrics


@pytest.mark.parametrize("backend", BACKENDS)
def test_freely_running_nothing_is_lost(backend: str, tmp_path: Path) -> None:
    """Though the learner makes the collectors wait; the returns are written down."""
    found = freely(backend, Task(steps=1500, warmup=200), tmp_path)
    assert found["lost"] == 0
    assert 0 <= found["idle_share"] < 1
    assert 0 < found["transport_share"] < 1
    assert found["weights_age_ms"] > 0
    (curve,) = tmp_path.glob("*.csv")
    assert len(curve.read_text().splitlines()) > 5


def test_pong_is_played_and_learnt(tmp_path: Path) -> None:
    """With pictures as observations, over shared memory."""
    task = preset(PONG, warmup=100, iterations=5, replay=500, collectors=1)
    found = freely("shm", task, tmp_path)
    assert found["lost"] == 0
    assert found["value"] > 0


@pytest.mark.parametrize("backend", ["zmq", "shm", "nng", "tcp", "torchrpc:cpu"])
def test_a_killed_collector_is_replaced_and_training_goes_on(backend: str) -> None:
    """The learner does not notice but by a new incarnation; nothing else is lost."""
    task = Task(steps=10**9, warmup=100)
    killed: list[int] = []

    def tick(training: Training) -> None:
        mine = [one for one in training.summary.senders if one[0] == "collector-0"]
        if training.learner.steps > 1000 and mine and not killed:
            (victim,) = (
                child
                for child in multiprocessing.active_children()
                if child.name == "collector-0"
            )
            killed.append(training.learner.iteration)
            victim.kill()
        if len(mine) == 2:
            training.stop()

    summary = train(task, backend, f"kill-{os.getpid()}-{backend}", tick=tick)

    assert summary.iterations > killed[0]
    assert summary.lost == 0


def test_an_interrupt_while_collectors_start_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that were started before are ended."""
    start = Crew._start

    def start_one(crew: Crew, index: int) -> ForkServerProcess:
        if index:
            raise KeyboardInterrupt
        return start(crew, index)

    monkeypatch.setattr(Crew, "_start", start_one)
    before = multiprocessing.active_children()
    with pytest.raises(KeyboardInterrupt), Crew("zmq", "none", Task(collectors=2)):
        pass
    assert multiprocessing.active_children() == before


def test_a_stopped_collector_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gets no signal but the one that cannot wait."""
    for grace in ("_GRACE", "_TERMINATION"):
        monkeypatch.setattr(crew_module, grace, 0.1)
    freed = threading.Event()
    with Crew("zmq", "none", Task(collectors=1)) as crew:
        (process,) = crew.processes
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

        def free() -> None:  # so that a test that fails comes to an end
            freed.set()
            os.kill(pid, signal.SIGKILL)

        guard = threading.Timer(60.0, free)
        guard.start()
    guard.cancel()
    assert not freed.is_set()


def test_training_goes_on_from_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the program's own options: counters, replay and returns are kept.

    It reports what the bench's rows have, and writes the returns beside it.
    """
    file = tmp_path / "dqn.pt"
    arguments = ["--backend", "zmq", "--collectors", "1", "--checkpoint", str(file)]
    assert main([*arguments, "--steps", "2000"]) == 0
    first = Learner(Task())
    first.load(file)
    assert first.steps >= 2000
    assert len(first.replay) > 1000

    assert main([*arguments, "--steps", "2500", "--resume"]) == 0

    second = Learner(Task())
    second.load(file)
    assert second.steps >= 2500
    assert second.iteration > first.iteration
    assert second.returns[: len(first.returns)] == first.returns
    *_, said = capsys.readouterr().out.splitlines()
    for figure in ("s/100 iterations", "steps/s", "idle", "in the transport"):
        assert re.search(rf"\d[\d.e-]*%? {figure}|{figure} [\d.]+%", said), figure
    assert re.search(r"weights' age [\d.]+ ms, p99 [\d.]+ ms;.* 0 messages lost", said)
    assert curves.read(tmp_path / "returns.csv") == second.returns
    names = {"dqn.pt", "returns.csv", "returns.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "returns.png").read_bytes().startswith(b"\x89PNG")


def played(count: int) -> dict[str, Any]:
    """A collector's chunk with observations such as CartPole's, drawn at random."""
    seen = np.random.default_rng(0).random((count + 1, 4), np.float32)
    steps, rows = NStep(1, 0.9), []
    for place in range(count):
        step = Step(seen[place + 1], float(place % 3), place % 10 == 9, False)
        rows += list(steps.add(seen[place], place % 2, step))
    return {"rows": pack(rows), "steps": count, "returns": [float(count)]}


def test_the_target_network_is_renewed_every_so_many_iterations() -> None:
    """Between them it stays behind the network that learns."""
    learner = Learner(Task(target_every=4))
    learner.take(played(100))
    for iteration in range(1, 9):
        learner.learn()
        renewed = iteration % 4 == 0
        pairs = zip(
            learner.target.parameters(), learner.online.parameters(), strict=True
        )
        assert all(torch.equal(one, other) is renewed for one, other in pairs)


def everything(learner: Learner) -> tuple[dict[str, Any], ...]:
    parts = (learner.online, learner.target, learner.optimizer)
    return tuple(copy.deepcopy(dict(part.state_dict())) for part in parts)


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_checkpoint_changes_nothing_in_what_is_learnt(
    prioritized: bool, tmp_path: Path
) -> None:
    """Both networks, the optimizer and the next draws are those that were saved."""
    first = Learner(Task(target_every=4, prioritized=prioritized))
    first.take(played(100))
    for _ in range(6):
        first.learn()
    first.save(tmp_path / "dqn.pt")
    second = Learner(Task(target_every=4, prioritized=prioritized, seed=1))
    second.load(tmp_path / "dqn.pt")
    assert second.returns == first.returns
    for _ in range(3):  # the target is renewed in between
        torch.testing.assert_close(
            everything(second), everything(first), rtol=0, atol=0
        )
        first.learn()
        second.learn()
    torch.testing.assert_close(everything(second), everything(first), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resume"], "--resume needs --checkpoint"),
        (["--role", "learner"], "needs --group"),
        (["--collectors", "0"], "no number from 1 on"),
        (["--n-step", "0"], "no number from 1 on"),
        (["--backend", "inproc"], "inproc joins threads of one process"),
        (["--backend", "zqm"], "did you mean 'zmq'?"),
    ],
)
def test_bad_arguments_are_refused_in_words(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a sentence and status 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_or_foreign_checkpoint_is_an_error_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, and the file is named."""
    file = tmp_path / "dqn.pt"
    assert main(["--checkpoint", str(file), "--resume"]) == 1
    assert str(file) in capsys.readouterr().err
    Learner(Task("Acrobot-v1")).save(file)
    assert main(["--checkpoint", str(file), "--resume"]) == 1
    assert "Acrobot-v1" in capsys.readouterr().err


def test_a_checkpoint_without_a_place_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour later all that was learnt would be lost."""
    for path in (tmp_path / "nodir" / "dqn.pt", tmp_path):
        assert main(["--checkpoint", str(path), "--game", "Nope-v1"]) == 1
        said = capsys.readouterr().err
        assert str(path) in said
        assert "Nope" not in said, "the learner was made first"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["bar", "pipe", "no tqdm"])
def test_a_person_sees_a_bar_and_a_file_gets_lines(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where tqdm is not installed; each says how far it is, and the mean."""
    shown = io.StringIO() if kind == "pipe" else Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(watch, "_SPOKEN", -1.0)
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # it has a thread for it
    if kind == "no tqdm":
        monkeypatch.setitem(sys.modules, "tqdm", None)
    task = Task(steps=400)
    learner = Learner(task)
    with watch.Watch(task).shown() as watched:
        learner.take(played(100) | {"returns": [7.0] * 100})
        watched.look(learner)
    said = shown.getvalue()
    if kind == "bar":
        assert re.search(r"25%\|.*100/400 .*step.*mean return 7\.0", said)
        assert "\n" not in said
    else:
        assert said == "100/400 steps, 0 iterations, mean return 7.0\n"


def test_the_returns_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    """Without a checkpoint, too; the folder is made, and no episode is no picture."""
    task, place = Task(), tmp_path / "new" / "one"
    learner = Learner(task)
    watch.Watch(task, None, place).end(learner)
    assert [path.name for path in place.iterdir()] == ["returns.csv"]
    learner.take(played(100))
    watch.Watch(task, None, place).end(learner)
    assert (place / "returns.csv").read_text().split() == ["steps,return", "100,100.0"]
    assert (place / "returns.png").exists()


def test_a_damaged_checkpoint_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    """As one that was cut short, is empty or text, or is of another program."""
    learner, file = Learner(Task()), tmp_path / "dqn.pt"
    learner.save(file)
    whole = file.read_bytes()
    for data in (b"", b"hello\n", whole[:100], whole[: len(whole) // 2], whole[:-10]):
        file.write_bytes(data)
        with pytest.raises(
            ValueError, match=r"dqn\.pt is damaged or no .* give a file"
        ):
            learner.load(file)
    torch.save(learner.online.state_dict(), file)
    with pytest.raises(ValueError, match=r"dqn\.pt is damaged or no checkpoint"):
        learner.load(file)
    learner.save(file)
    state = torch.load(file, weights_only=True)
    torch.save(state | {"online": {}}, file)
    with pytest.raises(ValueError, match=r"dqn\.pt does not fit: .*\s+Missing key"):
        learner.load(file)


def test_a_learner_without_collectors_gives_up() -> None:
    """With a timeout, not a hang, that says how long it waited and for what."""
    task = Task(patience=0.5)
    with (
        mq.connect("inproc", group="dqn-alone", name="learner") as queue,
        pytest.raises(mq.RecvTimeout, match=r"no collector .* for 0\.5 s: .* start 2"),
    ):
        Training(queue, task, Learner(task)).run()


def test_a_gap_in_a_collectors_messages_is_counted() -> None:
    """By sequence number, and apart for every incarnation."""

    def message(sequence: int, incarnation: str = "a") -> mq.Message:
        return mq.Message("t", None, "collector-0", sequence, incarnation, 0.0, 0)

    ledger = Ledger(whole=True)
    for one in (message(0), message(1), message(4), message(0, "b"), message(5)):
        ledger.take(one)
    assert ledger.lost == 2
    ledger.miss(mq.MessagesLost("collector-0", ["t"], 3))
    assert ledger.lost == 5
    ledger.take(message(9))  # that gap, of which it was told
    ledger.take(message(11))
    assert ledger.lost == 6
    resumed = Ledger(whole=False)
    resumed.take(message(7))
    assert resumed.lost == 0


@given(
    rewards=st.lists(st.floats(-1, 1), min_size=1, max_size=12),
    n=st.integers(1, 5),
    terminated=st.booleans(),
)
def test_n_step_returns_are_sums_over_the_next_n_steps(
    rewards: list[float], n: int, terminated: bool
) -> None:
    """To the end of the episode, where no estimate follows if it ended for good."""
    steps, found = NStep(n, 0.9), []
    for place, reward in enumerate(rewards):
        last = place == len(rewards) - 1
        after = np.array([place + 1.0])
        step = Step(after, reward, last and terminated, last and not terminated)
        found += list(steps.add(np.array([float(place)]), place, step))
    assert [one.action for one in found] == list(range(len(rewards)))
    for place, one in enumerate(found):
        window = rewards[place : place + n]
        expected = sum(0.9**k * reward for k, reward in enumerate(window))
        assert one.reward == pytest.approx(expected)
        assert one.after[0] == place + len(window)
        ended = terminated and place + len(window) == len(rewards)
        assert one.discount == (0.0 if ended else pytest.approx(0.9 ** len(window)))


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=40), st.integers(0, 99))
def test_a_sum_tree_draws_in_proportion(values: list[float], seed: int) -> None:
    """Every place lies where the sums of all before it say."""
    tree = SumTree(len(values))
    numbers = np.array(values)
    tree.set(np.arange(len(values)), numbers)
    tree.set(np.array([1]), numbers[1:2])
    at = np.random.default_rng(seed).random(20)
    places, shares = tree.draw(at)
    bounds = np.cumsum(numbers) / numbers.sum()
    expected = np.minimum(np.searchsorted(bounds, at, "right"), len(values) - 1)
    near = np.min(np.abs(bounds[:, None] - at), axis=0) < 1e-9  # rounding may decide
    assert np.all((places == expected) | near)
    assert shares == pytest.approx(numbers[places] / numbers.sum())


def row(number: int) -> dict[str, torch.Tensor]:
    step = Step(np.array([0.0]), float(number), True, False)
    return pack(list(NStep(1, 0.9).add(np.array([float(number)]), number, step)))


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_full_replay_forgets_the_oldest(prioritized: bool) -> None:
    """And a saved one draws what the original would have drawn."""
    replay = Replay(4, 0, prioritized)
    for number in range(6):
        replay.add(row(number))
    batch = replay.sample(200)
    assert set(batch.rows["action"].tolist()) == {2, 3, 4, 5}
    replay.learnt(batch, torch.linspace(0, 1, 200))
    copy = Replay(4, 1, prioritized)
    copy.load(replay.state())
    drawn, again = replay.sample(50), copy.sample(50)
    assert drawn.rows["action"].tolist() == again.rows["action"].tolist()
    assert torch.equal(drawn.weights, again.weights)


def test_large_errors_are_drawn_more_often() -> None:
    """And count less, so that the mean stays what it is."""
    replay = Replay(4, 0, prioritized=True)
    for number in range(4):
        replay.add(row(number))
    first = replay.sample(100)
    replay.learnt(first, (first.rows["action"] == 2).float())
    drawn = replay.sample(400)
    often = drawn.rows["action"] == 2
    assert often.sum() > 300
    assert drawn.weights[often].max() < drawn.weights[~often].min()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Nope-v1", "cannot make 'Nope-v1'"),
        ("ALE/Nope-v5", "cannot make 'ALE/Nope-v5'"),
        ("Pendulum-v1", "actions of Pendulum-v1 are Box.* such as CartPole-v1"),
        ("FrozenLake-v1", "observations of FrozenLake-v1 are Discrete"),
    ],
)
def test_a_game_that_is_not_for_this_is_refused(name: str, said: str) -> None:
    """In words, before a process is started."""
    with pytest.raises(ValueError, match=said):
        make(name)


@pytest.mark.parametrize(("name", "shape"), [(CARTPOLE, (4,)), (PONG, (4, 80, 80))])
def test_a_game_says_what_it_shows(name: str, shape: tuple[int, ...]) -> None:
    """Shape and kind of an observation are known before the first step."""
    game = make(name)
    seen = game.reset(seed=0)
    assert (seen.shape, seen.dtype) == (shape, game.dtype)
    assert game.shape == shape
    assert game.step(0).observation.shape == shape
    game.close()
