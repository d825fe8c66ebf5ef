"""What worker processes do in tests: work, but for one thing that goes wrong."""

import dataclasses
import functools
import itertools
import os
import signal
import struct
import threading
import time
from pathlib import Path

import numpy as np

from slipstream.config import Config
from slipstream.data.loader import Batch
from slipstream.dataparallel.lease_stage import LeaseProgram
from slipstream.dataparallel.shared import WeightBoard
from slipstream.dataparallel.stage_process import Part, StagePlace, work_stage
from slipstream.dataparallel.worker_process import Calibrate, Result, Workplace, work
from slipstream.models.llama import cross_entropy_sum
from slipstream.models.parts import LlamaParts

VOCAB_SIZE = 13
ODD = 1
"""Number of the worker that something happens to."""


def microbatch(config: Config, number: int) -> Batch:
    """Return a microbatch that depends on its number alone, all of whose targets count."""
    shape = (2, config.train.microbatch_size, config.data.sequence_length)
    inputs, targets = np.random.default_rng(number).integers(VOCAB_SIZE, size=shape)
    return Batch(index=number, inputs=inputs, targets=targets)


def plain(place: Workplace) -> None:
    """Do what is asked."""
    work(place, microbatches=functools.partial(microbatch, place.config))


def slows_down(place: Workplace) -> None:
    """Take ten times as long a microbatch as at first, from a certain microbatch on."""

    def source(number):
        if place.worker == ODD and number > 100:
            time.sleep(place.config.dataparallel.emulate_microbatch_ms / 100)
        return microbatch(place.config, number)

    work(place, microbatches=source)


def stops_once(place: Workplace) -> None:
    """Hang in the middle of some work, but not in another life."""
    note = Path(place.config.run_dir) / "stopped"

    def source(number):
        if place.worker == ODD and number > 40 and not note.exists():
            note.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return microbatch(place.config, number)

    work(place, microbatches=source)


def spoils(place: Workplace, *, times: int) -> None:
    """Compute so many microbatches' losses that are not finite, after the one of the warm-up."""
    calls = itertools.count()

    def spoiled(self, logits, targets):
        return cross_entropy_sum(logits, targets) * (float("nan") if 1 <= next(calls) <= times else 1.0)

    if place.worker == ODD:
        LlamaParts.loss_sum = spoiled
    plain(place)


def spoils_once(place: Workplace) -> None:
    """Compute one gradient that is not finite, of a microbatch."""
    spoils(place, times=1)


def spoils_always(place: Workplace) -> None:
    """Compute nothing that is finite."""
    spoils(place, times=10**9)


class Through:
    """A pipe that does what another does."""

    def __init__(self, pipe):
        self.pipe = pipe

    def send(self, report):
        self.pipe.send(report)

    def recv(self):
        return self.pipe.recv()


class Repeating(Through):
    """Sends every gradient twice, and once more after the one that follows."""

    def __init__(self, pipe):
        super().__init__(pipe)
        self.earlier = None

    def send(self, report):
        self.pipe.send(report)
        if isinstance(report, Result | Part):
            self.pipe.send(report)
            if self.earlier is not None:
                self.pipe.send(self.earlier)
            self.earlier = report


def repeats(place: Workplace) -> None:
    """Send everything too often, and out of order."""
    if place.worker == ODD:
        place = dataclasses.replace(place, pipe=Repeating(place.pipe))
    plain(place)


class Overtaking(WeightBoard):
    """Finds most versions overwritten."""

    def __init__(self, board):
        self.__dict__.update(board.__dict__)
        self.reads = 0

    def read(self, version, into):
        self.reads += 1
        return super().read(version, into) and self.reads % 3 == 0


def is_overtaken(place: Workplace) -> None:
    """Copy weights too slowly, two times of three."""
    if place.worker == ODD:
        place = dataclasses.replace(place, weights=Overtaking(place.weights))
    plain(place)


class OvertakenOnce(Overtaking):
    """Finds the first version overwritten, after others have had time for many."""

    def read(self, version, into):
        self.reads += 1
        if self.reads == 1:
            time.sleep(1.0)
            return False
        return WeightBoard.read(self, version, into)


def is_overtaken_once(place: Workplace) -> None:
    """Copy weights too slowly, the first time."""
    if place.worker == ODD:
        place = dataclasses.replace(place, weights=OvertakenOnce(place.weights))
    plain(place)


class Dying(Through):
    """Ends its process after the third gradient was sent, in its first life."""

    def __init__(self, pipe, note):
        super().__init__(pipe)
        self.note, self.sent = note, 0

    def send(self, report):
        self.pipe.send(report)
        self.sent += isinstance(report, Result)
        if self.sent == 3 and not self.note.exists():
            self.note.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)


def dies_while_it_waits(place: Workplace) -> None:
    """Die once, with a gradient pushed, and take a while to come back."""
    note = Path(place.config.run_dir) / "died"
    if place.worker == ODD:
        if note.exists():
            time.sleep(1.0)
        place = dataclasses.replace(place, pipe=Dying(place.pipe, note))
    plain(place)


def one_raises(place: Workplace) -> None:
    """Fail before the first gradient."""
    if place.worker == ODD:
        raise ZeroDivisionError("no first step for me")
    plain(place)


def all_raise(place: Workplace) -> None:
    """Fail before the first gradient."""
    raise ZeroDivisionError("no first step for anyone")


def has_other_settings(place: Workplace) -> None:
    """Train something else."""
    optim = dataclasses.replace(place.config.optim, lr=1.0)
    plain(dataclasses.replace(place, config=dataclasses.replace(place.config, optim=optim)))


def comes_late(place: Workplace) -> None:
    """The odd one needs its time to get here, each time."""
    if place.worker == ODD:
        time.sleep(1.0)
    plain(place)


def hangs_in_some_lives(place: Workplace) -> None:
    """The odd one hangs before it is ready, in every life but the second and the fourth."""
    lives = Path(place.config.run_dir) / "lives"
    if place.worker == ODD:
        with lives.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(lives.read_text().splitlines()) not in (2, 4):
            threading.Event().wait()
    plain(place)


class Untimed(Through):
    """Never hears that it shall be timed."""

    def recv(self):
        command = self.pipe.recv()
        return self.recv() if isinstance(command, Calibrate) else command


def is_not_timed(place: Workplace) -> None:
    """The odd one does not answer a calibration."""
    if place.worker == ODD:
        place = dataclasses.replace(place, pipe=Untimed(place.pipe))
    plain(place)


def is_killed_in_mid_message(place: Workplace) -> None:
    """The odd one has sent the beginning of a report when it is killed, in its first life."""
    note = Path(place.config.run_dir) / "killed"
    if place.worker == ODD and not note.exists():
        note.touch()
        os.write(place.pipe.fileno(), struct.pack("!i", 100_000) + b"the beginning")
        os.kill(os.getpid(), signal.SIGKILL)
    plain(place)


def all_hang(place: Workplace) -> None:
    """Never be ready."""
    os.kill(os.getpid(), signal.SIGSTOP)


# --- stages of workers that are pipelines ---------------------------------------------------------------------------


def plain_stage(place: StagePlace) -> None:
    """Do what is asked."""
    work_stage(place, microbatches=functools.partial(microbatch, place.config))


def late_stage(place: StagePlace) -> None:
    """The odd worker needs its time to get here, each time."""
    if place.worker == ODD:
        time.sleep(1.0)
    plain_stage(place)


def stops_in_the_middle(place: StagePlace) -> None:
    """The last stage of the odd worker hangs in the middle of some work, but not in another life."""
    note = Path(place.config.run_dir) / "stopped"

    def source(number):
        is_last = place.stage == place.config.dataparallel.num_stages - 1
        if place.worker == ODD and is_last and number > 40 and not note.exists():
            note.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return microbatch(place.config, number)

    work_stage(place, microbatches=source)


def repeats_parts(place: StagePlace) -> None:
    """Send everything too often, and out of order."""
    if place.worker == ODD:
        place = dataclasses.replace(place, pipe=Repeating(place.pipe))
    plain_stage(place)


def spoils_a_stage(place: StagePlace) -> None:
    """The first gradient of the odd worker is not finite on its last stage, and nowhere else."""
    exact = LeaseProgram.take_gradients
    calls = itertools.count()

    def spoiled(program):
        sums = exact(program)
        if next(calls) == 1:  # after the warm-up
            next(iter(sums.values())).fill_(float("nan"))
        return sums

    if place.worker == ODD and place.stage == 1:
        LeaseProgram.take_gradients = spoiled
    plain_stage(place)
