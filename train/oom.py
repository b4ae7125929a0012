"""Recovery from running out of memory during a step."""

from __future__ import annotations

from lib.devices.backend import is_out_of_memory
from lib.errors import OutOfMemory
from lib.plan import with_smaller_micro_batch
from lib.plan.types import Plan
from train.job import Job


def reason_if_out_of_memory(error: Exception) -> str:
    """Return the first line of an out-of-memory `error`; raise any other error again."""
    if not is_out_of_memory(error):
        raise error
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def smaller_plan(job: Job, reason: str) -> Plan:
    """Return a plan with a smaller micro-batch. Raises OutOfMemory if none exists or retries are disabled."""
    used, plan = job.plan.micro_batch, with_smaller_micro_batch(job.plan)
    what = f"out of memory at micro-batch {used}"
    if plan is None:
        raise OutOfMemory(f"{what}, and there is no smaller one", why=reason)
    by_hand = f"set CONFIG_HYPER_PARAM_MANUAL=y CONFIG_BATCH_SIZE={plan.micro_batch}"
    if job.backend.world > 1:
        # The other ranks wait in the backward pass and cannot be notified.
        raise OutOfMemory(f"{what} on one of several devices", why=reason, todo=by_hand)
    if not job.config.oom_retry:
        raise OutOfMemory(what, why=reason, todo=by_hand)
    job.record.replan(plan, f"{what}: going on with {plan.micro_batch}")
    return plan
