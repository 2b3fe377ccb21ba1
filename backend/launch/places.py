"""The drafter that stands in a verifier's place: what it is given.  Pure; the lender calls it."""

from __future__ import annotations

from dataclasses import replace

from backend.launch.plan import MemberPlan


def lent_drafter(verifier: MemberPlan, swapped: bool, devices: str) -> MemberPlan:
    """A drafter on the verifier's cores and GPUs.

    Where the verifier's process has ended (`swapped`), the drafter takes from Ray what the verifier had, so that nobody else
    gets it meanwhile.  Where the process only sleeps it keeps that; the drafter asks Ray for nothing, and is told by `devices`
    (as in CUDA_VISIBLE_DEVICES; empty: none) which GPUs to use.
    """
    member_id = drafter_name(verifier.member_id)
    env = dict(verifier.env)
    if devices and not swapped:
        env["CUDA_VISIBLE_DEVICES"] = devices
    return replace(
        verifier,
        member_id=member_id,
        kind="drafter",
        address=verifier.address.replace(f"/{verifier.member_id}.sock", f"/{member_id}.sock"),
        num_cpus=verifier.num_cpus if swapped else 0,
        num_gpus=verifier.num_gpus if swapped else 0,
        resources=verifier.resources if swapped else {},
        env=env,
    )


def drafter_name(verifier_id: str) -> str:
    """The same each time, so that metrics by drafter stay few."""
    return f"drafter-at-{verifier_id}"
