"""Work shared by processes, its results in order: whoever reads them cannot tell how many there were."""

import collections
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Self, TypeVar

from slipstream.errors import DataError

_AHEAD = 2
Item = TypeVar("Item")
Result = TypeVar("Result")


class Processes:
    """Processes that call functions; one stands for this process, and starts none.

    Args:
        count: How many, from 1.

    Example:
        >>> with Processes(1) as processes:
        ...     list(processes.in_order(abs, [-1, 2]))
        [1, 2]
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def in_order(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield a function's results in the order of its arguments, two a process under way at most.

        Raises:
            DataError: A process was killed.
        """
        if self.count == 1:
            yield from map(function, items)
            return
        pool = self._start()
        waiting: collections.deque[Future[Result]] = collections.deque()
        rest = iter(items)
        try:
            for item in itertools.islice(rest, _AHEAD * self.count):
                waiting.append(pool.submit(function, item))
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(function, item) for item in itertools.islice(rest, 1))
                yield result
        except BrokenProcessPool as error:
            raise DataError(
                f"one of the {self.count} processes that read the text was killed; the system may have run out of "
                "memory. Take fewer (--num-workers)."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            if error is not None:
                self._given_up.set()
            self._pool.shutdown(cancel_futures=True)

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Spawned, not forked: the tokenizer's threads do not survive a fork.
            context = multiprocessing.get_context("spawn")
            self._given_up = context.Event()
            self._pool = ProcessPoolExecutor(
                self.count, mp_context=context, initializer=_begin, initargs=(self._given_up,)
            )
        return self._pool


def _begin(given_up: Event) -> None:
    """Leave Ctrl-C to the process that has to clean up, and cores to the others; end with it, or with the work.

    Args:
        given_up: Set when nobody wants what is under way any more, which may be a file of hours.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_after, args=(parent.join,), daemon=True).start()
    threading.Thread(target=_end_after, args=(given_up.wait,), daemon=True).start()


def _end_after(wait: Callable[[], object]) -> None:
    wait()
    os._exit(1)
