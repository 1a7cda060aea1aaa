"""What glm52-plugin offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_recipes(register):
    """``rlcore train glm52`` (the default), and the same architecture small enough for a CPU."""
    register("glm52", "glm52_plugin.recipe:Glm52Recipe")
    register("glm52-toy", "glm52_plugin.toy:Glm52Toy")


@hookimpl
def rlcore_register_trainers(register):
    """The options of the Megatron-Core trainer."""
    register("megatron", "glm52_plugin.trainer:MegatronTrainer", needs="rlcore-megatron")


@hookimpl
def rlcore_register_engines(register):
    """The options of the SGLang engines."""
    register("sglang", "glm52_plugin.engine:SglangEngines", needs="rlcore-megatron")


@hookimpl
def rlcore_configure(config):
    """The configuration as a whole, wherever each value came from."""
    if config.recipe is not None and config.recipe.name.rpartition(":")[2] == "glm52":
        from glm52_plugin.whole import check

        check(config)


@hookimpl
def rlcore_select_recipe(model, hardware):
    """GLM-5.2 itself, or on a CPU a small model of its architecture."""
    from glm52_plugin.model import recipe_for

    return recipe_for(model, hardware)
