"""Tries again what a network or a server failed to do."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ...core.errors import SlipstreamError, StoreError
from ...core.progress import CancelToken

_Result = TypeVar("_Result")

log = logging.getLogger(__name__)


class RemoteError(StoreError):
    """A remote store does not answer, refuses, or gives what it should not."""


@dataclass(frozen=True)
class Retries:
    """How often to try, and how long to wait in between: twice as long each time, by up to half less by chance.

    Attributes:
        attempts: in all.
        first_s, longest_s: seconds to wait before the second attempt, and at most.
    """

    attempts: int = 5
    first_s: float = 0.25
    longest_s: float = 15.0

    def run(self, what: str, attempt: Callable[[], _Result], cancel: CancelToken) -> _Result:
        """What `attempt` returns once it succeeds.

        Raises:
            RemoteError: it failed too often, or for a reason that does not pass.
            FileNotFoundError: there is no such thing at the address.
            BuildCancelled: somebody cancelled it.
            SlipstreamError: of `attempt`, at once.
        """
        for number in range(1, self.attempts + 1):
            cancel.raise_if_cancelled(what)
            try:
                return attempt()
            except (FileNotFoundError, SlipstreamError):
                raise
            except PermissionError as error:
                raise RemoteError(f"{what} is not allowed: {error}. Check the credentials and the address") from error
            except Exception as error:  # every client library has errors of its own
                failure = error
            log.debug("%s: attempt %d: %s", what, number, failure)
            if number < self.attempts:
                pause = min(self.first_s * 2 ** (number - 1), self.longest_s)
                cancel.wait(pause * random.uniform(0.5, 1.0))
        raise RemoteError(
            f"{what} failed {self.attempts} times, last with {type(failure).__name__}: {failure}. Check the network "
            "and the address, then try again"
        ) from failure
