"""Prompts that a draft head learns from: code, sums and questions, the same ones for the same seed and Python version.

python examples/heads/prompts.py -o prompts.jsonl --each 400

None is of a public benchmark, so HumanEval, GSM8K and MT-Bench stay for measuring. Code is the signatures and
docstrings of the running Python's standard library; sums and questions are put together from the lists below.
"""

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "pydoc_data", "encodings"}

NAMES = (
    "Amina", "Bruno", "Chen", "Daria", "Emeka", "Farah", "Gustav", "Hana", "Ivo", "Jamila", "Kofi", "Lena", "Marta",
    "Nils", "Olga", "Pavel", "Rosa", "Samir", "Tove", "Yusuf",
)  # fmt: skip
THINGS = (
    "pencils", "stamps", "marbles", "bricks", "lemons", "tickets", "postcards", "seedlings", "cups", "shells",
    "badges", "candles",
)  # fmt: skip
SUMS = (
    "{a} has {x} {t} and gives {y} of them to {b}. Then {a} buys {z} boxes with {w} {t} in each. How many {t} "
    "does {a} have now?",
    "A shop sells {t} at {y} dollars each. {a} buys {z} and {b} buys twice as many. How many dollars do they "
    "pay together?",
    "{a} packs {w} {t} an hour and works {z} hours a day. How many {t} does {a} pack in {y} days?",
    "{a} and {b} share {x} {t}. {a} takes {y} more than {b}, who takes {w}. How many {t} are left?",
    "A train with {z} coaches has {x} seats in each coach. {w} seats in each coach are taken. How many seats are free?",
    "{a} saves {y} dollars each week. After {z} weeks {a} spends {w} dollars on {t}. How many dollars are left?",
    "{a} reads {w} pages on Monday and {y} more pages each day than on the day before. How many pages are "
    "read in {z} days?",
    "A garden is {x} metres long and {w} metres wide. {a} puts a post every {z} metres along its edge. How "
    "many posts are needed?",
    "In a box of {x} {t}, {y} are broken. {a} sells the rest for {z} dollars each. How many dollars does {a} take?",
    "{b} is {y} years old and {a} is {z} times as old. How old will {a} be in {w} years?",
    "{a} fills {z} jars with {w} {t} each and has {y} {t} left over. How many {t} were there at first?",
    "It takes {a} {x} minutes to walk to school and {b} {y} minutes less. How many minutes do both walk in "
    "{z} school days, there and back?",
)  # fmt: skip

TOPICS = (
    "volcanoes", "bread baking", "the water cycle", "honey bees", "the Silk Road", "electric cars", "sleep", "chess",
    "the printing press", "photosynthesis", "public libraries", "tides", "vaccines", "tea", "the Roman roads", "glass",
    "earthquakes", "compound interest", "coral reefs", "jazz", "solar panels", "migrating birds", "the alphabet",
    "recycling", "marathon training", "black holes", "medieval castles", "cheese", "trains", "the human heart",
    "desert plants", "programming languages", "the stock market", "snow", "bridges", "whales", "city parks",
    "the immune system", "pottery", "radio", "antibiotics", "maps", "lighthouses", "coffee", "mushrooms", "sailing",
    "robots", "the moon", "databases", "soil",
)  # fmt: skip
ASKED = (
    "Explain {t} to a child of ten.",
    "Write a short story in which {t} changes somebody's day.",
    "What are the most common mistakes that people make about {t}?",
    "Give five tips for a beginner who wants to know more about {t}.",
    "Write an email to a colleague that asks for help with a talk on {t}.",
    "Compare {t} and {u}: name what they have in common and where they differ.",
    "Summarize the history of {t} in one paragraph.",
    "Write a poem of eight lines about {t}.",
    "You are a museum guide. Welcome a group and introduce a room on {t}.",
    "List the main arguments for and against spending public money on {t}.",
    "What would happen if {t} vanished tomorrow? Reason step by step.",
    "Write a quiz with four questions on {t}, and give the answers.",
    "Describe {t} in three sentences, then say why it matters.",
    "Plan a lesson of one hour on {t} for a school class.",
    "Write a dialogue between a teacher and a student about {t}.",
    "How has {t} changed over the last hundred years?",
)  # fmt: skip


def code_prompts() -> Iterator[str]:
    """Every documented function of the standard library, its body left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if isinstance(node, ast.FunctionDef) and doc and 40 <= len(doc) <= 600:
                body = "\n".join(f"    {line}".rstrip() for line in doc.splitlines())
                yield f'def {node.name}({ast.unparse(node.args)}):\n    """{body.strip()}\n    """\n'


def sum_prompts(chance: random.Random) -> Iterator[str]:
    """Word problems without end."""
    while True:
        a, b = chance.sample(NAMES, 2)
        x, y, z, w = chance.randint(40, 90), chance.randint(3, 19), chance.randint(2, 9), chance.randint(5, 30)
        text = chance.choice(SUMS).format(a=a, b=b, t=chance.choice(THINGS), x=x, y=y, z=z, w=w)
        yield f"Question: {text}\nAnswer:"


def asked_prompts(chance: random.Random) -> Iterator[str]:
    """Every question with every topic, in a random order."""
    pairs = [(asked, topic) for asked in ASKED for topic in TOPICS]
    for asked, topic in chance.sample(pairs, len(pairs)):
        yield asked.format(t=topic, u=chance.choice([other for other in TOPICS if other != topic]))


def make_prompts(each: int, seed: int) -> list[dict[str, str]]:
    """``each`` different prompts of every kind, the kinds in turns; SystemExit if a kind has fewer."""
    chance = random.Random(seed)
    code = list(dict.fromkeys(code_prompts()))
    kinds = {"code": iter(chance.sample(code, len(code))), "math": sum_prompts(chance), "chat": asked_prompts(chance)}
    seen: dict[str, dict[str, None]] = {kind: {} for kind in kinds}
    for kind, prompts in kinds.items():
        for prompt in prompts:
            if len(seen[kind]) == each:
                break
            seen[kind][prompt] = None
        if len(seen[kind]) < each:
            raise SystemExit(f"there are only {len(seen[kind])} prompts of kind {kind}")
    columns = [[{"domain": kind, "prompt": prompt} for prompt in found] for kind, found in seen.items()]
    return [prompt for turn in zip(*columns, strict=True) for prompt in turn]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--each", type=int, default=400, help="prompts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines = [json.dumps(prompt) for prompt in make_prompts(args.each, args.seed)]
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{args.output}: {len(lines)} prompts")
