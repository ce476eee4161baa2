"""A reward of one's own: part credit for every digit in its right place."""


def digits_in_place(completion: str, answer: str) -> dict[str, object]:
    """1 for the whole answer; else half of the share of digits that stand right."""
    if completion == answer:
        return {"reward": 1.0, "outcome": "ok"}
    hits = sum(mine == right for mine, right in zip(completion, answer, strict=False))
    return {"reward": 0.5 * hits / max(len(completion), len(answer)), "outcome": "wrong"}
