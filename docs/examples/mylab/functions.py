def brief(completion: str, answer: str, **row: object) -> float:
    return float(completion.strip() == answer) - 0.01 * len(completion)
