"""The classes that skeletons are made of pass their own tests here too, as part of the core."""

from rlcore.testing.skeletons.check_advantage import TestSkeleton as TestAdvantage
from rlcore.testing.skeletons.check_agent import TestSkeleton as TestAgent
from rlcore.testing.skeletons.check_correction import TestSkeleton as TestCorrection
from rlcore.testing.skeletons.check_grader import test_no_verdict_is_not_zero, test_right_and_wrong
from rlcore.testing.skeletons.check_loss import TestSkeleton as TestLoss
from rlcore.testing.skeletons.check_policy import TestSkeleton as TestPolicy
from rlcore.testing.skeletons.check_taskset import (
    test_an_empty_set_is_refused,
    test_ids_are_unique_and_tasks_are_complete,
    test_the_order_depends_on_the_options_alone,
)
from rlcore.testing.skeletons.check_tracker import test_each_step_is_a_line

__all__ = [
    "TestAdvantage",
    "TestAgent",
    "TestCorrection",
    "TestLoss",
    "TestPolicy",
    "test_an_empty_set_is_refused",
    "test_each_step_is_a_line",
    "test_ids_are_unique_and_tasks_are_complete",
    "test_no_verdict_is_not_zero",
    "test_right_and_wrong",
    "test_the_order_depends_on_the_options_alone",
]
