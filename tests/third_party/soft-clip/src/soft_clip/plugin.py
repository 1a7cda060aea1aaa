"""What this distribution offers."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_losses(register):
    register("soft_clip", "soft_clip.loss:SoftClip")
