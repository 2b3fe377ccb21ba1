"""The report of a round: the summary of its rows, and what only the rollout knows.  Pure.

With fixed responses, acceptance is agreement with a trace.  It is called *teacher-forced* and has fields of its own, so that it
is not taken for a live figure.
"""

from typing import Any

import msgspec

from backend.records.markdown import FORCED, sections
from backend.records.reading import worker_of
from backend.records.summary import Summary, summarise
from backend.rollout.outcome import RoundResult


def round_report(finished: RoundResult, about: dict[str, Any], weights: str = "0") -> tuple[dict[str, Any], str]:
    """The contents of `report.json` and `report.md`; `weights` is the version of the weights."""
    summary = summarise([worker_of(part.number, part.rows, part.requests) for part in finished.parts])
    kind = "teacher_forced" if about["fixed_responses"] else "live"
    drafting = summary.teacher_forced if about["fixed_responses"] else summary.live
    tokens = sum(len(finished.tokens(number)) for number in finished.responses)
    report = about | msgspec.to_builtins(summary)
    report |= {
        "round": finished.number,
        "requests": len(finished.responses),
        "wall_s": finished.wall_s,
        "tokens": tokens,
        "tokens_per_s": tokens / finished.wall_s,
        "acceptance_is": kind,
        f"{kind}_acceptance_length": drafting.acceptance_length,
        "weights": weights,
        "died": msgspec.to_builtins(finished.deaths),
    }
    return report, _markdown(report, summary)


def _markdown(report: dict[str, Any], summary: Summary) -> str:
    kind = report["acceptance_is"]
    length = report[f"{kind}_acceptance_length"]
    straggler = summary.straggler
    label = FORCED if report["fixed_responses"] else "Responses were free: acceptance is live."
    lines = [
        f"# Step {report['step']}, round {report['round']}",
        "",
        f"Mode `{report['mode']}`, drafts by {report['method']}, K = {report['k']}; model {report['model']}, "
        f"{report['drafters']} drafter(s). {label}",
        "",
        f"- {report['requests']} requests, {report['tokens']} tokens in {report['wall_s']:.1f} s: "
        f"{report['tokens_per_s']:.0f} tokens/s",
        f"- acceptance length ({kind.replace('_', '-')}): {length:.2f}" if length else "- nothing was drafted",
        f"- weights: {report['weights']}",
        f"- straggler: worker {straggler.worker}, done after {straggler.finished_s:.1f} s, "
        f"{straggler.behind_the_others_s:.1f} s behind the others",
    ]
    lines += [
        f"- **worker {death['worker']} {death['reason']}** after {death['at_s']:.1f} s; "
        f"{death['requests_resumed']} requests went on at others"
        for death in report["died"]
    ]
    return "\n".join([*lines, *sections(summary)]) + "\n"
