"""Discovery of plugins: isolated, loud, and with provenance.

Plugins are modules behind entry points of the group ``rlcore``, or modules that are named by their dotted path. A
broken one is listed with its reason and takes nothing down; one that was asked for by name stops the command. A process
loads its plugins once, with :func:`load_plugins`, and passes the :class:`Plugins` on.
"""

from rlcore.plugins._discovery import load_plugins
from rlcore.plugins._names import canonical, nearest, reason
from rlcore.plugins._records import KINDS, Offer, Plugin
from rlcore.plugins._registry import Plugins

__all__ = ["KINDS", "Offer", "Plugin", "Plugins", "canonical", "load_plugins", "nearest", "reason"]
