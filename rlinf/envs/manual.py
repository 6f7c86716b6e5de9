"""Real texts to search, and questions about them: the reference manual that comes with Python.

The texts are the paragraphs of ``pydoc_data.topics``, what ``help("topics")`` shows (Python
Software Foundation License). A question is one of their sentences without a name that it quotes
once, a cloze (Taylor, Cloze Procedure, Journalism Quarterly 30, 1953): it has one right answer,
which stands in the text and nowhere in the question.
"""

from __future__ import annotations

import re
from functools import lru_cache

from rlinf.envs.arithmetic import is_held_out
from rlinf.envs.corpus import Document, Question, shuffled

QUOTED = re.compile(r'"([A-Za-z_][A-Za-z0-9_.]{2,30})(\(\))?"')
SENTENCES = re.compile(r'(?<=[.!?]) (?=[A-Z"])')
PARAGRAPH = (40, 800)
"""Characters. Shorter ones are headings; longer ones, tables most of them, would be cut off where
they are shown."""
SENTENCE = (50, 220)
GAP = "____"
ASKED = "Which name stands at {} in Python's manual? {}"


@lru_cache(maxsize=1)
def manual() -> tuple[tuple[Document, ...], tuple[Question, ...], tuple[Question, ...]]:
    """Texts, and questions for training and held out: by sentence, in an order that stays.

    They are those of the interpreter's own version of Python.
    """
    from pydoc_data.topics import topics

    documents, asked = dict[str, Document](), dict[str, Question]()
    for topic, text in sorted(topics.items()):
        for paragraph in re.split(r"\n\s*\n", text):
            plain = " ".join(paragraph.split())
            # Grammar and examples are no sentences.
            if not PARAGRAPH[0] <= len(plain) <= PARAGRAPH[1] or "::=" in plain or ">>>" in plain:
                continue
            # Some topics contain others.
            documents.setdefault(plain, Document(f"{topic}\n{plain}"))
            for sentence in SENTENCES.split(plain):
                if (question := _question(sentence)) is not None:
                    asked.setdefault(question.text, question)
    test = [question for text, question in asked.items() if is_held_out(text)]
    train = [question for text, question in asked.items() if not is_held_out(text)]
    return tuple(documents.values()), shuffled(train, "manual"), shuffled(test, "manual")


def _question(sentence: str) -> Question | None:
    """A sentence without the name that it quotes; None: it has not just one."""
    found = list(QUOTED.finditer(sentence))
    if len(found) != 1 or not sentence.endswith("."):
        return None
    name = found[0][1]
    if sentence.lower().count(name.lower()) > 1:
        return None
    left, right = sentence[: found[0].start()], sentence[found[0].end() :]
    if not SENTENCE[0] <= len(sentence) <= SENTENCE[1]:
        return None
    text = ASKED.format(GAP, f"{left}{GAP}{right}")
    return Question(text, (name,), (" ".join(f"{left}{right}".split()),))
