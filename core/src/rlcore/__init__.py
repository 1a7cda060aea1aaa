"""rlcore trains language-model agents by reinforcement learning; everything that is not the core is a plugin."""

from rlcore.hookspecs import HOOK_API, hookimpl

__all__ = ["HOOK_API", "__version__", "hookimpl"]

__version__ = "0.1.0"
