"""What rlcore-quickstart offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_recipes(register):
    """``rlcore train quickstart``."""
    register("quickstart", "rlcore_quickstart.recipe:QuickstartRecipe")
