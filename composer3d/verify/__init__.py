"""Prove that a layout computes what one process computes.

``composer3d.verify`` is this package and a function: a package can be called if its class says so.
The function is ``verify.call.verify``.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        from composer3d.verify.call import verify

        return verify(*arguments, **keywords)


sys.modules[__name__].__class__ = _CallablePackage
