"""Tables in Markdown and what stands in them, for the scripts that report."""

ALPHA = 0.01  # of a verdict, after Holm's correction


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def number(value, form):
    return "–" if value is None else format(value, form)


def p_text(p):
    if p is None:
        return "–"
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def interval_text(result):
    """Of paired differences of losses (t_tests.Paired)."""
    return "–" if result.low is None else f"{result.low:+.5f} to {result.high:+.5f}"


def verdict(result, adjusted):
    """Of the same, in words; adjusted: p after Holm's correction. Differences below zero are gains."""
    if adjusted is None:
        return "undecided: too few seeds"
    if adjusted < ALPHA:
        return "**helps**" if result.mean < 0 else "**hurts**"
    if result.low >= 0:
        return "does not help" if result.mean > 0 else "no difference"
    return f"undecided; no gain beyond {-result.low:.5f} (95%)"
