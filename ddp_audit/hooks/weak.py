"""A map from objects to what we know of them that keeps none of them alive.

``WeakKeyDictionary`` asks keys for ``__hash__`` and ``__eq__``, which belong to the user's class;
this one goes by identity.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class WeakIdMap(Generic[V]):
    """Identity map with weak keys.

    Args:
        on_death: called with the value when its key has gone. It runs inside garbage collection, in
            any thread: it may append to a deque and nothing more.
    """

    def __init__(self, on_death: Callable[[V], None] | None = None) -> None:
        self._items: dict[int, tuple[weakref.ref[Any], V]] = {}
        self._on_death = on_death

    def get(self, key: Any) -> V | None:
        """The value, or ``None``."""
        item = self._items.get(id(key))
        return item[1] if item is not None and item[0]() is key else None

    def set(self, key: Any, value: V) -> None:
        """Remember a value.

        Raises:
            TypeError: the object cannot be referred to weakly.
        """
        number = id(key)
        items, on_death = self._items, self._on_death

        def gone(reference: weakref.ref[Any]) -> None:
            item = items.get(number)
            if item is not None and item[0] is reference:
                del items[number]
                if on_death is not None:
                    on_death(item[1])

        items[number] = (weakref.ref(key, gone), value)

    def pop(self, key: Any) -> V | None:
        """Forget a key."""
        value = self.get(key)
        if value is not None:
            del self._items[id(key)]
        return value

    def items(self) -> Iterator[tuple[Any, V]]:
        """The keys still alive, with their values."""
        for reference, value in list(self._items.values()):
            key = reference()
            if key is not None:
                yield key, value

    def clear(self) -> None:
        """Forget all."""
        self._items.clear()

    def __len__(self) -> int:
        return len(self._items)
