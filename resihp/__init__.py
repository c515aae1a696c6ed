"""ResiHP keeps hybrid-parallel LLM training running while GPUs die.

The public names load their modules when first used, so `import resihp` costs nothing:

    parsed = resihp.parse(text)
    findings = resihp.verify(parsed)
    decision = resihp.adapt(parsed.plan, lost=[5], speed={12: 0.5})
    print(decision.summary())
    print(resihp.print_plan(decision.plan))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resihp.compiler import facts_of, initial_plan, lower, schedule_order
    from resihp.compiler.adapt import adapt
    from resihp.config import load as load_config
    from resihp.errors import ResihpError
    from resihp.ir.expand import expand
    from resihp.ir.parser import parse
    from resihp.ir.printer import print_plan
    from resihp.ir.verify import verify

__version__ = "0.1.0"

__all__ = [
    "ResihpError",
    "__version__",
    "adapt",
    "expand",
    "facts_of",
    "initial_plan",
    "load_config",
    "lower",
    "parse",
    "print_plan",
    "schedule_order",
    "verify",
]

_HOME = {
    "ResihpError": ("resihp.errors", "ResihpError"),
    "adapt": ("resihp.compiler.adapt", "adapt"),
    "expand": ("resihp.ir.expand", "expand"),
    "facts_of": ("resihp.compiler", "facts_of"),
    "initial_plan": ("resihp.compiler", "initial_plan"),
    "load_config": ("resihp.config", "load"),
    "lower": ("resihp.compiler", "lower"),
    "parse": ("resihp.ir.parser", "parse"),
    "print_plan": ("resihp.ir.printer", "print_plan"),
    "schedule_order": ("resihp.compiler", "schedule_order"),
    "verify": ("resihp.ir.verify", "verify"),
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'resihp' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOME[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
