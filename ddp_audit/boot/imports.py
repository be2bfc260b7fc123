"""The finder that calls a hook just after a module was imported for the first time.

It finds nothing itself: the real finders make the real spec, and only ``exec_module`` of that one
loader object is shadowed until it has run. Loader type, ``__loader__`` and ``__spec__`` stay genuine.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # see process.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class PostImportFinder:
    """A ``sys.meta_path`` finder for the names of a table.

    Args:
        names: modules to watch.
        after: called with the name and the module once the module's own code has run; whatever
            it raises is its own business to swallow.
    """

    def __init__(self, names: frozenset[str], after: Callable[[str, Any], None]) -> None:
        self._names = names
        self._after = after
        self._busy: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The real spec with its loader's ``exec_module`` shadowed, or ``None``: not ours."""
        if name not in self._names or name in self._busy:
            return None
        self._busy.add(name)  # another finder may walk sys.meta_path itself and come back here
        try:
            spec = None
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                if finder is self or find is None:
                    continue
                spec = find(name, path, target)
                if spec is not None:
                    break
            if spec is not None:
                self._shadow(name, spec.loader)
            return spec
        finally:
            self._busy.discard(name)

    def _shadow(self, name: str, loader: Any) -> None:
        after = self._after

        def exec_module(module: Any) -> None:
            loader.__dict__.pop("exec_module", None)
            loader.exec_module(module)
            after(name, module)

        # Named as importlib's own frame, so that tracebacks through an import and the stacklevel of
        # warnings raised in it come out as without us.
        exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")
        if isinstance(loader, type) or not hasattr(loader, "exec_module"):
            return  # built-in and frozen modules, old-style loaders: nothing we watch is one
        try:
            loader.exec_module = exec_module
        except (AttributeError, TypeError):
            return  # a loader without instance attributes stays as it is


def install(names: frozenset[str], after: Callable[[str, Any], None]) -> None:
    """Put the finder first."""
    sys.meta_path.insert(0, PostImportFinder(names, after))
