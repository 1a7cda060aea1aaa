"""What rlcore-losses offers; imports nothing heavy."""

from rlcore import hookimpl


@hookimpl
def rlcore_register_advantages(register):
    """Advantage estimators."""
    register("grpo", "rlcore_losses.advantages:GRPO")
    register("dr_grpo", "rlcore_losses.advantages:DrGRPO")
    register("rloo", "rlcore_losses.advantages:RLOO")
    register("reinforce", "rlcore_losses.advantages:ReinforceAdvantage")
    register("reinforce_pp", "rlcore_losses.advantages:ReinforcePP")
    register("reinforce_pp_baseline", "rlcore_losses.advantages:ReinforcePPBaseline")
    register("opo", "rlcore_losses.advantages:OPO")
    register("maxrl", "rlcore_losses.advantages:MaxRL")
    register("gdpo", "rlcore_losses.advantages:GDPO")
    register("gigpo", "rlcore_losses.turn_advantages:GiGPO")
    register("gae", "rlcore_losses.turn_advantages:GAE")


@hookimpl
def rlcore_register_corrections(register):
    """Corrections."""
    register("none", "rlcore_losses.corrections:NoCorrection")
    register("token_tis", "rlcore_losses.corrections:TokenTIS")
    register("sequence_tis", "rlcore_losses.corrections:SequenceTIS")
    register("geometric_tis", "rlcore_losses.corrections:GeometricTIS")
    register("turn_tis", "rlcore_losses.corrections:TurnTIS")
    register("icepop", "rlcore_losses.corrections:IcePop")
    register("token_mask", "rlcore_losses.rejections:TokenMask")
    register("sequence_mask", "rlcore_losses.rejections:SequenceMask")
    register("geometric_mask", "rlcore_losses.rejections:GeometricMask")
    register("turn_mask", "rlcore_losses.rejections:TurnMask")
    register("prob_diff_mask", "rlcore_losses.rejections:ProbDiffMask")
    register("kl_reject", "rlcore_losses.rejections:KLReject")
    register("veto", "rlcore_losses.rejections:Veto")
    register("opsm", "rlcore_losses.rejections:OPSM")
    register("chain", "rlcore_losses.chain:Chain")


@hookimpl
def rlcore_register_losses(register):
    """Policy losses."""
    register("ppo_clip", "rlcore_losses.losses:PPOClip")
    register("gspo", "rlcore_losses.row_losses:GSPO")
    register("cispo", "rlcore_losses.losses:CISPO")
    register("sapo", "rlcore_losses.losses:SAPO")
    register("gmpo", "rlcore_losses.row_losses:GMPO")
    register("dppo_tv", "rlcore_losses.losses:DPPOTV")
    register("dppo_kl", "rlcore_losses.losses:DPPOKL")
    register("reinforce", "rlcore_losses.losses:Reinforce")
    register("decoupled", "rlcore_losses.decoupled:Decoupled")
    register("cross_entropy", "rlcore_losses.losses:CrossEntropy")


@hookimpl
def rlcore_register_aggregations(register):
    """Aggregations."""
    register("token_mean", "rlcore_losses.aggregations:TokenMean")
    register("sequence_mean_token_mean", "rlcore_losses.aggregations:SequenceMeanTokenMean")
    register("sequence_sum_fixed", "rlcore_losses.aggregations:SequenceSumFixed")
    register("prompt_mean", "rlcore_losses.aggregations:PromptMean")


@hookimpl
def rlcore_add_commands(group):
    """``rlcore losses``."""
    group.lazy("losses", "rlcore_losses.commands:app", "List corrections, losses, advantages, aggregations; show one.")


@hookimpl
def rlcore_configure(config):
    """Combinations that would train something else than they say."""
    from rlcore_losses.compatibility import check

    check(config)


@hookimpl
def rlcore_preflight(config):
    """Foreign pieces whose shapes do not fit."""
    from rlcore_losses.probe import preflight

    return preflight(config)
