"""Events in one order for all leaders, on the store that all ranks share."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

from torch.distributed import Store

from megatron_rl.rollout.ledger import Event


class StoreBoard:
    """The events of one rollout. What the store counts decides their order."""

    def __init__(self, store: Store, name: str) -> None:
        """Open the board of that name; every leader opens it."""
        self.store, self.name = store, name
        self.read: list[Event] = []
        """What this rank has read, in order."""

        self._posted: list[str] = []

    def post(self, event: Event) -> None:
        """See `Board`."""
        key = self._key(self.store.add(f"{self.name}/count", 1))
        self._posted.append(key)
        self.store.set(key, pickle.dumps(event))  # type: ignore[arg-type]  # bytes are taken

    def news(self) -> Iterator[Event]:
        """See `Board`. Who stops in the middle leaves the rest for the next call."""
        count = self.store.add(f"{self.name}/count", 0)
        while len(self.read) < count:
            # Its writer counted it a moment ago: the store waits for it.
            event = pickle.loads(self.store.get(self._key(len(self.read) + 1)))
            self.read.append(event)
            yield event

    def clear(self) -> None:
        """Take back what this rank posted; when nobody reads any more."""
        for key in self._posted:
            self.store.delete_key(key)
        self._posted.clear()
        self.store.delete_key(f"{self.name}/count")

    def _key(self, number: int) -> str:
        return f"{self.name}/{number}"
