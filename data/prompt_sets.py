"""Prompts of many kinds, for `generate_data --prompts`: `python -m data.prompt_sets --output prompts.jsonl`.

A drafter drafts well what it was trained on, so the training prompts should be as mixed as the traffic. Without a set of
one's own, this one makes prompts from three sources that every machine has: word lists and sentence patterns below,
functions of Python's standard library, and chats that the target wrote before (``--chats``: from `generate_data` without
``--prompts``), whose answers become the texts to summarise, to translate and to answer questions about.

Everything is drawn with ``--seed``, so the same command on the same Python and chats gives the same file.
"""

import argparse
import ast
import json
import os
import random
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from data.conversations import read_jsonl
from data.plans import TOOLS


NAMES = (
    "Ana Ben Carla David Emma Farid Grace Hiro Ines Jonas Kofi Lena Maya Noah Olga Pedro Priya Sam Tara Yusuf".split()
)
THINGS = "apples books bottles cookies eggs flowers marbles notebooks oranges pencils shirts stamps stickers tickets toys".split()
JOBS = "a baker,a bus driver,a carpenter,a chemist,a doctor,a farmer,a fisherman,a librarian,a nurse,a pilot,a poet".split(
    ","
)
FIGURES = (
    "a medieval knight,Albert Einstein,Cleopatra,a pirate captain,Sherlock Holmes,a stand-up comedian,a museum guide,"
    "Marie Curie,a talking cat,a retired astronaut,a Roman senator,a strict grammar teacher,William Shakespeare"
).split(",")
PLACES = (
    "Argentina,Australia,Berlin,Brazil,Cairo,Canada,Chicago,Chile,Denmark,Egypt,Finland,Greece,Hawaii,Iceland,India,Istanbul,"
    "Japan,Kenya,Lima,London,Madrid,Mexico,Morocco,Nepal,New Zealand,Norway,Paris,Peru,Rome,Seoul,Texas,Tokyo,Vietnam"
).split(",")
WORKS = (
    "Alice in Wonderland,Back to the Future,Casablanca,Don Quixote,Dracula,Forrest Gump,Frankenstein,Friends,Grease,Hamlet,"
    "Harry Potter,Jurassic Park,King Kong,Les Miserables,Moby Dick,Rocky,Star Trek,The Godfather,The Lion King,"
    "The Matrix,The Odyssey,The Simpsons,The Sound of Music,Titanic,Toy Story,War and Peace,West Side Story"
).split(",")
THEMES = (
    "acid rain,antibiotics,artificial intelligence,black holes,blockchain,climate change,comets,democracy,DNA,earthquakes,"
    "electric cars,evolution,existentialism,fermentation,free trade,glaciers,globalisation,gravity,habits,immigration,"
    "impressionism,inflation,jazz,justice,kidneys,lightning,magnetism,memory,microplastics,migration of birds,"
    "nuclear energy,nutrition,ocean currents,photosynthesis,plate tectonics,prime numbers,probability,quantum computers,"
    "relativity,renewable energy,robots,sleep,social media,solar panels,stoicism,supply and demand,taxes,the Cold War,"
    "the French Revolution,the Industrial Revolution,the Renaissance,the Roman Empire,the Silk Road,the immune system,"
    "the moon landing,the water cycle,tides,tourism,urbanisation,vaccines,volcanoes,whales,women's suffrage,working from home"
).split(",")
QUESTIONS = (
    "Where is {place} on the map?,What is the capital of {place}?,When did {place} host the Olympics?,Who wrote {work}?,"
    "Who played the lead in {work}?,When did {work} come out?,How many seasons of {work} are there?,Who sings in {work}?,"
    "What is the main cause of {theme}?,Who discovered {theme}?,What does {theme} mean?,When did {theme} begin?,"
    "How many people live in {place}?,What language do they speak in {place}?,Who is the head of government in {place}?,"
    "Where does the story of {work} take place?,Why is {theme} important?,What is the largest city in {place}?,"
    "When is the best time to visit {place}?,Where was {work} filmed?,How does {theme} work?,When was {theme} first described?"
).split(",")
WRITING = (
    "Write a short story about {job} who moves to {place}.|Write a poem about {theme}.|Write an email to {name}, who asked for a report on {theme}.|"
    "Write a blog post about a trip to {place}.|Write a persuasive speech about {theme}.|Describe a rainy evening in {place} so that one can see it.|"
    "Write a product description of a new kind of {thing}.|Write a dialogue between {job} and {other} about {theme}.|"
    "Write the opening paragraph of a mystery set in {place}.|Write a letter of recommendation for {name}, who worked as {job}.|"
    "Write a review of {work}.|Compose a song about {place}.|Draft a cover letter for {name}, who wants to become {job}."
).split("|")
ROLES = (
    "Pretend to be {figure}. What do you think of {theme}?|You are {figure}. Tell me about your day in {place}.|Act as {job} and explain {theme} to a customer.|"
    "I want you to answer as {figure} would. How do I learn about {theme}?|Imagine that you are {job} in {place}. Why did you choose this work?"
).split("|")
STEM = (
    "Explain {theme} in simple terms.|What are the causes and effects of {theme}?|How are {theme} and {theme2} related?|Give five facts about {theme}.|"
    "What is the history of {theme}?|Compare {theme} with {theme2}.|What are the arguments for and against {theme}?|Explain {theme} to a child of five.|"
    "What would happen without {theme}?|Design an experiment to learn more about {theme}.|Write an essay outline on {theme}.|What are common mistakes about {theme}?"
).split("|")
REASONING = (
    "{name} is taller than {name2}, and {name2} is taller than {name3}. Who is the shortest? Explain.|"
    "All {thing} in the box are red. {name} took something from the box that is blue. Did {name} take one of the {thing}? Why?|"
    "{name} has three sisters, and each of them has one brother. How many brothers are there? Think step by step.|"
    "If it takes {a} machines {a} minutes to make {a} {thing}, how long do {b} machines need for {b} {thing}?|"
    "Which one does not belong: {thing}, {thing2}, {place}, {thing3}? Explain why."
).split("|")
MATHS = (
    "{name} buys {a} {thing} for ${b} each and {c} {thing2} for ${d} each. How much does {name} spend in total?|"
    "{name} has {a} {thing}. {name2} has {b} times as many. How many {thing} do they have together?|"
    "There are {c} boxes with {a} {thing} each. {b} of the {thing} are broken. How many are good?|"
    "{name} reads {a} pages on Monday, {b} more on Tuesday, and half of Monday's on Wednesday. How many pages did {name} read?|"
    "A train goes {a}0 miles in {b} hours. How far does it go in {c} hours at the same speed?|"
    "{name} earns ${a} an hour and works {b} hours a day, {c} days a week. {name} spends ${d}. How much is left after a week?|"
    "{name} had {a} {thing}, gave {b} to {name2}, lost {c}, and then bought {d} more. How many does {name} have now?|"
    "A shirt costs ${a}0. It is sold at {c}0% off. {name} buys {b}. How much does {name} pay?|"
    "{a} friends share {b}0 {thing} equally, and {name} eats {c} of them. How many are left?|"
    "{name} is {a} years old. In {b} years {name2} will be twice as old as {name} is now. How old is {name2}?|"
    "The area of a rectangle is {a} times {b} square feet. Its length is {a} feet. What is its perimeter?|"
    "Solve for x: {a}x + {b} = {c}{d}.|What is {a}{b} times {c}?|What is {c}0% of {a}{b}?"
).split("|")
CODING = (
    "Write a Python function that takes a list of {thing} and returns {goal}.|Write a C++ program that reads numbers from a file and prints {goal}.|"
    "Write a SQL query that gives {goal} from a table of {thing}.|Implement {algorithm} in Python and explain how fast it is.|"
    "How do I {chore} in {language}?|What is the difference between {pair}?|Write unit tests for a function that returns {goal}.|"
    "Write a {language} class for a shop that sells {thing}.|Write a shell script to {chore}.|Create an HTML page that shows {goal}."
).split("|")
GOALS = (
    "the average,the second largest value,the three most common ones,those that occur twice,the sum of the even ones,"
    "the longest name,a running total,the ones sorted by price,the median,all pairs that add up to ten"
).split(",")
ALGORITHMS = (
    "binary search,quick sort,merge sort,breadth-first search,Dijkstra's algorithm,a linked list,a hash table,"
    "the sieve of Eratosthenes,a binary tree,a stack,the edit distance of two strings,matrix multiplication"
).split(",")
CHORES = (
    "read a CSV file,remove duplicates from a list,reverse a string,count words in a text,connect to a database,"
    "parse JSON,rename many files,download a web page,sort a dictionary by value,convert a date,draw a histogram"
).split(",")
LANGUAGES = "Python,JavaScript,Java,C,Go,Rust".split(",")
PAIRS = "a list and a tuple|TCP and UDP|a process and a thread|HTTP GET and POST|an interface and a class|git merge and git rebase".split(
    "|"
)
# German sentences are put together from these: subject, verb before and after the object, object, and what follows.
SUBJECTS = (
    "Die Regierung|Der Minister|Die Polizei|Das Unternehmen|Die Universität|Der Trainer|Die Bank|Der Verein|Die Kommission|Das Gericht|"
    "Die Stadt Hamburg|Ein Sprecher der Firma|Die Opposition|Der Präsident|Die Mannschaft|Eine neue Studie|Mein Nachbar|Die Lehrerin"
).split("|")
PAST = (
    "hat am Montag|hat nach langen Verhandlungen|hat in der vergangenen Woche|hat zum ersten Mal seit zehn Jahren|hat trotz der Krise",
    "vorgestellt|kritisiert|verschoben|geprüft|verteidigt|abgelehnt|gelobt|beobachtet|verändert|vergessen",
)
FUTURE = (
    "will im nächsten Jahr|muss bis zum Herbst|sollte nach Ansicht vieler Bürger|darf ohne Zustimmung des Parlaments nicht|möchte schon bald",
    "vorstellen|kritisieren|verschieben|prüfen|verteidigen|ablehnen|unterstützen|verhindern|erklären|besprechen",
)
OBJECTS = (
    "die neuen Pläne|einen Vertrag mit Frankreich|die Zahl der Unfälle|das alte Krankenhaus|den Verlust von Arbeitsplätzen|die Steuern für Familien|"
    "den Ausbau der Bahn|ein Spiel gegen Spanien|die Preise für Strom|zwei verdächtige Männer|die Ergebnisse der Wahl|den Schutz der Wälder"
).split("|")
CLAUSES = (
    "|, weil das Geld fehlt|, obwohl viele Menschen dagegen sind|, sagte ein Sprecher am Abend|, um die Umwelt zu schützen|"
    ", wie die Zeitung berichtet|, damit die Kinder sicher zur Schule kommen|, bevor der Winter beginnt"
).split("|")
TRANSLATE = ("Translate German to English: {german}",) * 5 + (
    "Translate into German: {sentence}",
    "Translate to French: {sentence}",
    "Translate the following into Spanish: {sentence}",
    "How do you say this in Italian? {sentence}",
)
SUMMARISE = (
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize the following text in two sentences.\n\n{text}",
    "What are the main points of this text?\n\n{text}",
    "Give this text a title and explain your choice.\n\n{text}",
)
EXTRACT = (
    "List all names of people and places in this text.\n\n{text}",
    "Rate the mood of each of these texts from 1 to 5 and return the numbers as JSON.\n1. {sentence}\n2. {sentence2}\n3. {sentence3}",
    "Extract the key facts from the text below as a bulleted list.\n\n{text}",
    "Correct the grammar of this sentence: {sentence}",
    "Rewrite this in a more formal tone: {sentence}",
)
ASK = (
    "{text}\n{question}",
    "{text}\n\n{question}",
    "Answer from the passage.\n\nPassage: {text}\n\nQuestion: {question}",
)
CODE = (
    "What does this function do?\n\n```python\n{code}\n```",
    "Write a docstring for this function.\n\n```python\n{code}\n```",
    "Add type hints and comments to this code.\n\n```python\n{code}\n```",
    "Rewrite this function so that it is easier to read.\n\n```python\n{code}\n```",
    "Write a Python function `{name}` that does this: {does}",
    "Is there a bug in this code?\n\n```python\n{code}\n```",
)
CALLS = (
    "What will the weather be like in {place} tomorrow?|Convert ${a}0 into euros.|Search for news about {theme}.|Do I need an umbrella in {place} on Friday?|"
    "How many yen are {a}{b} dollars?|Find out who wrote {work}, and what the weather is in {place}."
).split("|")
FOLLOW_UPS = (
    "Can you make it shorter?|Explain that again in simpler words.|Give an example.|Are you sure? Check it step by step.|Rewrite your answer as a list.|"
    "What else should I know?|Now write it as a poem.|What are the disadvantages?"
).split("|")
CHARACTERS = 300, 2600  # of a text to work on, from and to


@lru_cache
def library_functions() -> list[dict]:
    """Functions of the standard library with a docstring, 3 to 25 lines of code: ``name``, ``does`` and ``code``."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            source = path.read_text()
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.FunctionDef)
                and (does := ast.get_docstring(node))
                and not node.name.startswith("_")
            ):
                start = node.body[0]
                node.body = node.body[1:] or [ast.Pass()]  # without the docstring: it would tell the answer
                code = ast.unparse(node)
                if 3 <= code.count("\n") <= 25 and isinstance(start, ast.Expr):
                    found.append({"name": node.name, "does": does.split("\n\n")[0].replace("\n", " "), "code": code})
    return found


def read_chats(path) -> list[tuple[str, str]]:
    """The first question and answer of each chat in JSON Lines. Raises ValueError where there is none with a text."""
    pairs = []
    for _, row in read_jsonl(path):
        messages = row.get("messages") if isinstance(row, dict) else None  # else a bad line
        talk = (
            [m for m in messages if not (isinstance(m, dict) and m.get("role") == "system")]
            if isinstance(messages, list)
            else []
        )
        match talk:
            case [{"role": "user", "content": str(question)}, {"role": "assistant", "content": str(answer)}, *_]:
                if len(answer) >= CHARACTERS[0] and not answer.startswith("I'm sorry"):
                    pairs.append((question, answer.strip()))
    if not pairs:
        raise ValueError(
            f"{path} has no answer of {CHARACTERS[0]} characters or more: name chats that the target wrote"
        )
    return pairs


def sentences_of(text: str) -> list[str]:
    parts = text.replace("\n", " ").split(". ")
    return [part.strip() + "." for part in parts if 40 <= len(part) <= 200] or [text[:200]]


def fields(draw: random.Random, chats: list[tuple[str, str]]) -> dict[str, str]:
    """One value for every blank that the patterns have; those of ``chats`` only where there are any."""
    (name, name2, name3), (thing, thing2, thing3) = draw.sample(NAMES, 3), draw.sample(THINGS, 3)
    (theme, theme2), (job, other) = draw.sample(THEMES, 2), draw.sample(JOBS, 2)
    values = {
        "name": name,
        "name2": name2,
        "name3": name3,
        "thing": thing,
        "thing2": thing2,
        "thing3": thing3,
        "theme": theme,
    }
    values |= {"theme2": theme2, "job": job, "other": other, "place": draw.choice(PLACES), "work": draw.choice(WORKS)}
    values |= {"figure": draw.choice(FIGURES), "goal": draw.choice(GOALS), "algorithm": draw.choice(ALGORITHMS)}
    values |= {"chore": draw.choice(CHORES), "language": draw.choice(LANGUAGES), "pair": draw.choice(PAIRS)}
    values |= {letter: str(draw.randint(2, 9) if letter in "bd" else draw.randint(2, 30)) for letter in "abcd"}
    verb, end = (draw.choice(forms.split("|")) for forms in draw.choice((PAST, FUTURE)))
    values["german"] = f"{draw.choice(SUBJECTS)} {verb} {draw.choice(OBJECTS)} {end}{draw.choice(CLAUSES)}."
    if chats:
        first = draw.randrange(len(chats))
        question, text = chats[first]
        length = draw.randint(*CHARACTERS)
        while len(text) < length and draw.random() < 0.5:
            text += "\n\n" + draw.choice(chats)[1]
        values |= {"question": question, "text": text[:length]}
        for key in ("sentence", "sentence2", "sentence3"):
            values[key] = draw.choice(sentences_of(draw.choice(chats)[1]))
    return values


def make_prompts(count: int, seed: int, chats: list[tuple[str, str]]) -> Iterator[dict]:
    """``count`` different rows with ``id``, ``category``, and ``turns`` or, where there are tools, ``messages``.

    The categories take turns. Without ``chats`` (question and answer each) those that work on a text are left out.
    """
    kinds = {"qa": QUESTIONS, "maths": MATHS, "code": CODE, "writing": WRITING, "roleplay": ROLES, "stem": STEM}
    kinds |= {"reasoning": REASONING, "coding": CODING, "tools": CALLS}
    if chats:
        kinds |= {"translation": TRANSLATE, "summary": SUMMARISE, "rag": ASK, "extraction": EXTRACT}
    if count < 1:
        raise ValueError(f"--num_prompts is {count}: it has to be at least 1")
    hint = "ask for fewer, or with more --chats" if chats else "add --chats"
    draw, seen, repeats = random.Random(seed), set(), 0
    while len(seen) < count:
        if repeats > 1000:
            raise ValueError(f"--num_prompts {count}: the patterns give only {len(seen)} different ones; {hint}")
        kind = list(kinds)[len(seen) % len(kinds)]
        values = fields(draw, chats)
        if kind == "code":
            values |= draw.choice(library_functions())
        text = draw.choice(kinds[kind]).format(**values)
        repeats = repeats + 1 if text in seen else 0
        if repeats:
            continue
        row = {"id": f"{kind}-{len(seen):05}", "category": kind}
        seen.add(text)
        if kind == "tools":
            yield row | {"messages": [{"role": "user", "content": text}], "tools": TOOLS}
        else:
            more = [draw.choice(FOLLOW_UPS)] if draw.random() < 0.15 else []
            yield row | {"turns": [text, *more]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.prompt_sets", description="Prompts of many kinds.")
    parser.add_argument("--output", required=True, help="JSON Lines file to write")
    parser.add_argument("--num_prompts", type=int, default=4000, help="how many (%(default)s)")
    parser.add_argument("--chats", help="JSON Lines: chats of the target, as texts to work on")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (%(default)s)")
    args = parser.parse_args(arguments)
    try:
        rows = list(make_prompts(args.num_prompts, args.seed, read_chats(args.chats) if args.chats else []))
        partial = Path(f"{args.output}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        os.replace(partial, args.output)  # whole or not at all
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    counts = Counter(row["category"] for row in rows)
    print(f"{args.output}: {len(rows)} prompts; {', '.join(f'{n} {kind}' for kind, n in counts.items())}")


if __name__ == "__main__":
    main()
