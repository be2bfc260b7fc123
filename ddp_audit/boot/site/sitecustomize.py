"""Runs at the start of every Python process of a probed job, before the user's first line.

Must cost next to nothing, leave no trace that the user's code could trip over, and never raise.
It steps aside for the ``sitecustomize`` that it hides, if there is one.
"""

import os
import sys


def _activate(here):  # type: ignore[no-untyped-def]
    """Load ``ddp_audit`` from our own folder, whatever else is installed, and start it."""
    if os.environ.get("DDP_AUDIT") == "0" or not os.environ.get("_DDP_AUDIT_SETTINGS"):
        return
    package = os.path.dirname(os.path.dirname(here))
    if "ddp_audit" not in sys.modules:
        # By path: our version must meet our own settings, and nothing else that is installed
        # beside us may become importable in the job's environment.
        import _frozen_importlib  # type: ignore[import-not-found]
        import _frozen_importlib_external as external  # type: ignore[import-not-found]

        spec = external.spec_from_file_location(
            "ddp_audit", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
        )
        module = _frozen_importlib.module_from_spec(spec)
        sys.modules["ddp_audit"] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop("ddp_audit", None)
            raise
    from ddp_audit.boot import process

    process.start()


def _chain():  # type: ignore[no-untyped-def]
    """Run the ``sitecustomize`` that ours hides; its errors are reported by Python as ever."""
    import _frozen_importlib
    import _frozen_importlib_external as external

    spec = external.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = _frozen_importlib.module_from_spec(spec)
    sys.modules["sitecustomize"] = module  # replaced, not removed: importlib looks for the name afterwards
    spec.loader.exec_module(module)


def _run():  # type: ignore[no-untyped-def]
    here = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    try:
        _activate(here)
    except Exception:
        # The process then runs as if it were not probed; the report says that its journal is missing.
        pass
    _chain()


_run()
