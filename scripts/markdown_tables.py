"""Tables in Markdown and the numbers in them, for the scripts that report."""


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def number(value, form):
    return "–" if value is None else format(value, form)


def p_text(p):
    if p is None:
        return "–"
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"
