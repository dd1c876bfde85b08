"""Docstrings, comments, messages and pages use plain English and name no requirement: a check of words that can always be replaced.

It reads comments, pages, and the strings of a module that contain a space. Names in code, and strings that are one word, are free.
"""

import io
import re
import tokenize
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

SOURCES = ("core", "backends", "adapters", "properties", "src/trainfold", "examples")
PAGES = ("docs", "README.md", "CONTRIBUTING.md", "UPGRADING.md", "CHANGELOG.md")
TESTS = "tests"  # ids are for them
ITSELF = "tests/project/test_plain_english.py"

WORDS = {  # what to find -> what to write instead
    r"mend(?:s|ed|ing)?": "fix",
    r"anew": "again; restarts; from scratch",
    r"nobody": "no rank; no caller; no program",
    r"dear(?:er|ly)?": "expensive",
    r"(?:let|lets|letting) go": "release",
    r"lent": "borrowed; a view",
    r"(?:tell|tells|telling|told)": "log; raise; report; say; distinguish",
    r"(?<!there )(?:is|are|was|were) none": "is not one; is absent; is None",
    r"(?<!there )(?:is|are|was|were) no (?!longer|more|less|fewer|larger|smaller|better|worse|shorter|greater|different|later|earlier|"
    r"wider|newer|older|slower|faster)\w+": "is not a",
    r"whom?ever": "the caller; the thread that; any rank that",
    r"(?:some|any)body": "the caller; a program; a user",
    r"(?:say|says|said|saying) so": "pass; log; report; return",
    r"as good as": "equivalent to; usable",
    r"of the kind that fits": "the matching subclass",
    r"(?:what|nothing|everything|something) (?:that )?(?:(?:is|was|were|will be|(?:they )?(?:has|had|have)(?: been)?) )drawn(?! from)": "name it: "
    "the batches; the samples; the random numbers",
    r"(?:what|nothing|everything|something) (?:that )?(?:is|was|were) held": "name it: the leaves; the lock",
    r"(?<!lock )(?<!lock is )held (?:by|against|to|off|back|as)": "referenced by; checked by; kept; stored",
}
FORBIDDEN = re.compile(rf"\b(?:{'|'.join(f'({word})' for word in WORDS)})\b", re.IGNORECASE)
FOR_IDS = "say what it requires; ids belong to tests"
INSTEAD = tuple(WORDS.values())
ID = re.compile(r"\b(?![CFIU](?:16|32|64))[A-X][0-9]{2}\b")  # not the codes of types in a file of safetensors
LITERAL = re.compile(r"\s")
STRINGS = {
    tokenize.STRING,
    *(getattr(tokenize, name, tokenize.STRING) for name in ("FSTRING_MIDDLE", "TSTRING_MIDDLE")),
}


def prose(source: str) -> Iterator[tuple[int, str]]:
    """The comments and strings of a module, each with its first line; a `|` if there is code between two of them."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string[1:]
        elif token.type in STRINGS and LITERAL.search(token.string):
            text = re.sub(r"\{[^{}]*\}", "{}", token.string) if token.string[0] in "fF" else token.string
            yield token.start[0], text.replace('"', " ")
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            yield token.start[0], "|"


def findings(parts: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Line, words and advice for each finding; a phrase may continue on the next line."""
    found: list[str] = []
    starts, lines, length = list[int](), list[int](), 0
    for first, text in parts:
        for offset, line in enumerate(text.split("\n")):
            for word in line.split():
                if word == "|" and found[-1:] == ["|"]:
                    continue
                found.append(word)
                starts.append(length)
                lines.append(first + offset)
                length += len(word) + 1
    text = " ".join(found)
    for match in FORBIDDEN.finditer(text.replace("None", "----")):
        yield lines[bisect_right(starts, match.start()) - 1], match[0], f"write: {INSTEAD[(match.lastindex or 1) - 1]}"
    for match in ID.finditer(text):
        yield lines[bisect_right(starts, match.start()) - 1], match[0], FOR_IDS


def check(path: Path, root: Path) -> list[str]:
    """The findings in a file, one line each."""
    source = path.read_text("utf-8")
    if path.suffix == ".py":
        rough = re.sub(r'[\s"#|]+', " ", source).replace("None", "----")  # has all of the prose, without a tokenizer
        parts = prose(source) if FORBIDDEN.search(rough) or ID.search(rough) else iter(())
    else:
        parts = iter([(1, source)])
    name = str(path.relative_to(root))
    found = [f"{name}:{line}: {words!r}: {advice}" for line, words, advice in findings(parts)]
    return [each for each in found if not name.startswith(TESTS) or not each.endswith(FOR_IDS)]


def files(root: Path) -> list[Path]:
    """All modules and pages that are checked."""
    modules = [path for folder in (*SOURCES, TESTS) for path in (root / folder).rglob("*.py")]
    pages = [path for place in PAGES for path in (root / place).rglob("*.md")] + [
        root / place for place in PAGES if place.endswith(".md")
    ]
    return sorted(each for each in {*modules, *pages} if "_build" not in each.parts and each != root / ITSELF)


def test_sources_and_pages_use_plain_words_and_name_no_requirement(root):
    """Every finding is listed, with its line and what to write instead."""
    found = [each for path in files(root) for each in check(path, root)]
    assert not found, f"{len(found)} findings:\n" + "\n".join(found)


BAD = '''"""A loop that nobody asks (C14)."""

KEY = "told"  # the key is no
# prose


def lent(state, held_leaf):
    """The state that there is none of; None where the value is None.

    It is no longer read, and there is no
    other. Unless it is
    none.
    """
    raise Broken(fix=f"let {lent} " "go: the {told} is as "
        "good as before, as float F32")
'''


def test_the_check_finds_each_word_on_its_line_and_leaves_code_alone(tmp_path):
    """Phrases are found across lines; names, keys, None, ordinary negations and the codes of types are left alone."""
    module, page = tmp_path / "bad.py", tmp_path / "bad.md"
    module.write_text(BAD)
    page.write_text(
        "# A page\n\nTell\n`tell_all` whatever E16 requires.\nA batch is drawn; the lock is held by it; held leaves. What was drawn is held\nby it.\n"
    )
    assert [each.split(": write")[0].split(": say")[0] for each in check(module, tmp_path)] == [
        "bad.py:1: 'nobody'",
        "bad.py:3: 'is no prose'",
        "bad.py:11: 'is none'",
        "bad.py:14: 'told'",
        "bad.py:14: 'as good as'",
        "bad.py:1: 'C14'",
    ]
    assert check(page, tmp_path) == [
        "bad.md:3: 'Tell': write: log; raise; report; say; distinguish",
        "bad.md:5: 'What was drawn': write: name it: the batches; the samples; the random numbers",
        "bad.md:5: 'held by': write: referenced by; checked by; kept; stored",
        "bad.md:4: 'E16': say what it requires; ids belong to tests",
    ]
