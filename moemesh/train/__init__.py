"""Training: the loop of a rank, its data, optimizer, checkpoints and reports.

The package can be called: ``moemesh.train(config, out=...)`` is
:func:`moemesh.train.from_python.train`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package that can be called: `moemesh.train` is also a verb of the public interface, in
    whatever order its modules are imported."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from moemesh.train.from_python import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
