"""The page's data and actions, independent of Gradio and of the host."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..core.errors import EngineInUse, StoreError
from ..engine_cache import Entry
from ..runtime.building.build_queue import Ticket, TicketState
from ..runtime.provider import EngineProvider
from ..runtime.reporting.engine_info import details, overview
from ..runtime.reporting.machine_info import describe_machine
from ..runtime.reporting.recent_log import recent_log
from ..runtime.requests.build_needs import Needs, foresee
from ..runtime.requests.build_requests import BuildRequest, BuildRequests, ModelBuilder, Wanted, describe_requests
from ..runtime.requests.model_grid import model_grid, wanted_for
from ..runtime.requests.pruning import prune
from ..runtime.settings.model_settings import Resolution, parse_resolutions
from ..sampling.saved import SavedPreset, presets_folder, saved_presets


class Manager:
    """The engines of one store, and the requests of one process; shared by all pages that are open.

    Args:
        provider: the host's own, so that its builds show here too.
        builder: what the host does for requests.
        home: where calibrated presets lie beside engines; default: the store's folder.
    """

    def __init__(self, provider: EngineProvider, builder: ModelBuilder, home: Path | None = None) -> None:
        self.provider = provider
        self._home = home or provider.store.root
        self.builder = builder
        self.requests = BuildRequests(builder, lambda request: self._note_change())
        self._changes = itertools.count(1)
        self._changed = 0
        self._more_sizes: Sequence[Resolution] = ()
        self._log = recent_log()
        provider.queue.listen(self._hear)

    # Engines

    def overview(self) -> dict[str, Any]:
        """The store and its engines, as `slipstream list` tells."""
        return overview(self.provider.store)

    def calibrated(self) -> list[SavedPreset]:
        """The presets of step skipping that were calibrated here."""
        return list(saved_presets(presets_folder(self._home)).values())

    def version(self) -> tuple[int, int]:
        """Changes whenever engines were added, removed or changed, by this or another process."""
        try:
            touched = os.stat(self.provider.store.root / "engines").st_mtime_ns
        except OSError:  # no store yet
            touched = 0
        return self._changed, touched

    def details(self, prefix: str) -> dict[str, Any]:
        """All that is known of an engine.

        Raises:
            ValueError: there is none whose id begins so.
        """
        entry = self._entry(prefix)
        return {**details(entry), "in_use": self.provider.store.is_used(entry.digest)}

    def verify(self, prefixes: Sequence[str] | None = None) -> dict[str, str | None]:
        """Compare the files of some engines (None: all) with their checksums: digest → what is wrong, or None.

        Raises:
            ValueError: one of them is gone.
        """
        store = self.provider.store
        if prefixes is None:
            found = store.verify_all()
        else:
            found = {digest: store.verify(digest) for digest in self._digests(prefixes)}
        self._note_change()
        return found

    def delete(self, prefixes: Sequence[str]) -> tuple[list[str], list[str]]:
        """Remove engines.

        Returns:
            Digests of those that are gone, and why others are not.

        Raises:
            ValueError: one of them was gone already; nothing was deleted.
        """
        deleted, reasons = [], []
        for digest in self._digests(prefixes):
            try:
                self.provider.delete(digest)
                deleted.append(digest)
            except (EngineInUse, StoreError) as error:
                reasons.append(str(error))
        self._note_change()
        return deleted, reasons

    def prune(self, limit_bytes: int, days: float | None) -> list[Entry]:
        """Remove the least recently used engines.

        Args:
            limit_bytes: what may stay.
            days: also those that were not used for so long.

        Raises:
            StoreError: the store cannot be written.
        """
        older = None if days is None else timedelta(days=days)
        removed = prune(self.provider.store, limit_bytes, older)
        self._note_change()
        return removed

    def grid(self) -> dict[str, Any]:
        """What is there for each model and picture size; see `model_grid`."""
        return model_grid(self.provider.store, self.builder, self.requests.all(), self._more_sizes)

    def show_sizes(self, text: str) -> None:
        """Have the grid show further picture sizes, on all pages.

        Raises:
            ValueError: the text is no list of sizes.
        """
        self._more_sizes = parse_resolutions(text)[:_MOST_SIZES]
        self._note_change()

    def request_cell(self, model: str, size: str) -> BuildRequest:
        """Have the engine of a cell of the grid built.

        Raises:
            BackendUnavailable: nothing here could build it.
            ValueError: there is no such model or size.
        """
        (resolution,) = parse_resolutions(size)
        return self.request_build(wanted_for(model, resolution))

    # Building

    def foresee(self, wanted: Wanted) -> Needs:
        """Estimate time, memory and disk space of a build request.

        Raises:
            BackendUnavailable: nothing here could build it.
            ValueError: the model is not offered.
        """
        wanted = self._offered(wanted)
        parameters = self.builder.parameter_count(wanted.model, wanted.role)
        return foresee(self.provider, self.builder.device(), wanted, parameters)

    def request_build(self, wanted: Wanted) -> BuildRequest:
        """Have engines made.

        Raises:
            BackendUnavailable: nothing here could build them.
            ValueError: the model is not offered.
        """
        self.foresee(wanted)  # fails before a model is loaded
        return self.requests.submit(self._offered(wanted))

    def progress(self) -> list[dict[str, Any]]:
        """Requests, and builds that nodes or others of this process asked for; see `describe_requests`."""
        return describe_requests(self.requests, self.provider.queue)

    def cancel(self) -> str:
        """Stop what is under way, or comes next; its name, or an empty text where there is nothing to stop."""
        for request in self.requests.pending():
            if not request.token.cancelled:
                self.requests.cancel(request.id)
                return str(request.wanted)
        for ticket in self.provider.queue.pending():
            ticket.cancel()
            return str(ticket.plan)
        return ""

    def cancel_all(self) -> int:
        """Stop all requests and builds of this process; how many there were."""
        requests, tickets = self.requests.pending(), self.provider.queue.pending()
        for request in requests:
            self.requests.cancel(request.id)
        for ticket in tickets:
            ticket.cancel()
        return max(len(requests), len(tickets))

    # Around it

    def log(self) -> dict[str, Any]:
        """Slipstream's last lines; see `RecentLog.after`."""
        return self._log.after(0)

    def machine(self) -> dict[str, Any]:
        return describe_machine(self.builder.device(), self.provider.backends, self.provider.history)

    def _entry(self, prefix: str) -> Entry:
        found = self.provider.store.find(prefix) if prefix else []
        if len(found) != 1:
            raise ValueError(f"There is no engine {prefix} any more; press Refresh")
        return found[0]

    def _digests(self, prefixes: Iterable[str]) -> list[str]:
        return [self._entry(prefix).digest for prefix in prefixes]

    def model_named(self, typed: str) -> str:
        """The model file that a person means: its whole name, or a part of it that no other file has.

        Raises:
            ValueError: no file is meant, or several may be.
        """
        offered = self.builder.models()
        text = typed.strip()
        if text in offered:
            return text
        fitting = [name for name in offered if text.lower() in name.lower()]
        exact = [name for name in fitting if Path(name).stem.lower() == text.lower() or name.lower() == text.lower()]
        if len(exact or fitting) == 1:
            return (exact or fitting)[0]
        if fitting:
            raise ValueError(f"{text!r} may be {_few(fitting)}: write more of the name, or choose one from the list")
        close = get_close_matches(text.lower(), [name.lower() for name in offered], 3, 0.4)
        near = [name for name in offered if name.lower() in close] or offered
        there = f"the closest: {_few(near)}" if offered else "there is none at all"
        raise ValueError(f"There is no model file {text!r}; {there}. “Look for files” finds new ones")

    def _offered(self, wanted: Wanted) -> Wanted:
        if wanted.role not in self.builder.roles:
            raise ValueError(f"Engines for a {wanted.role.value} are built when a workflow first uses it")
        return replace(wanted, model=self.model_named(wanted.model))

    def _hear(self, ticket: Ticket) -> None:
        if ticket.state is TicketState.DONE:
            self._note_change()

    def _note_change(self) -> None:
        self._changed = next(self._changes)


_MOST_SIZES = 12
_NAMED = 4


def _few(names: Sequence[str]) -> str:
    """Some names in words, and how many more there are."""
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
