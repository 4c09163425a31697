"""Generates wikitext: English words without meaning in the markup of articles.

A pure function of the generator that it is given."""

from __future__ import annotations

import random

COMMON = """the of and to in a is that it was for on with as his they be at one have this from or
had by but some what there we can out other were all your when up use word how said an each she
which do their time if will way about many then them would write like so these her long make thing
see him two has look more day could go come did my sound no most number who over know water than
call first people may down side been now find any new work part take get place made live where after
back little only round man year came show every good me give our under name very through just form
much great think say help low line before turn cause same mean differ move right boy old too does
tell sentence set three want air well also play small end put home read hand port large spell add
even land here must big high such follow act why ask men change went light kind off need house
picture try us again animal point mother world near build self earth father"""

SYLLABLES = "an bel cor dun el far gal hol ist jor kel lin mar nor os pra quen ros sal tor"

ABOUT = "railway station junction bridge harbour valley parish engine company district"


class Writer:
    """Words, sentences, paragraphs and articles, drawn from a generator."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._syllables = SYLLABLES.split()
        self._nouns = ["".join(rng.choices(self._syllables, k=3)) for _ in range(2000)]
        self._words = COMMON.split() * 20 + self._nouns + ABOUT.split() * 40

    def name(self) -> str:
        """Two words, such as the title of an article."""
        words = ("".join(self._rng.choices(self._syllables, k=3)) for _ in range(2))
        return " ".join(word.capitalize() for word in words)

    def noun(self) -> str:
        """One word that is rare."""
        return self._rng.choice(self._nouns)

    def sentence(self, num_words: int) -> str:
        """A sentence without markup."""
        words = self._rng.choices(self._words, k=num_words)
        if num_words > 12:
            words[num_words // 2] += ","
        return " ".join(words).capitalize() + "."

    def paragraphs(self, num_words: int) -> list[str]:
        """Plain paragraphs of three to six sentences, with about this many words in all."""
        paragraphs, left = [], num_words
        while left > 0:
            lengths = [self._rng.randint(8, 22) for _ in range(self._rng.randint(3, 6))]
            paragraphs.append(" ".join(map(self.sentence, lengths)))
            left -= sum(lengths)
        return paragraphs

    def nearly(self, paragraph: str) -> str:
        """The paragraph with one word in a hundred replaced, and at least one in each long one."""
        words = paragraph.split(" ")
        for _ in range(max(1, len(words) // 100)):
            place = self._rng.randrange(1, len(words) - 1)
            words[place] = self.noun()
        return " ".join(words)

    # --- markup -------------------------------------------------------------------------------

    def article(self, title: str, paragraphs: list[str]) -> str:
        """The wikitext of an article with these paragraphs: their words stay as they are, if links
        are replaced by their labels and templates, tables and references removed."""
        rng = self._rng
        parts = [self._opening(title)]
        for number, paragraph in enumerate(paragraphs):
            if number and rng.random() < 0.4:
                level = "=" * rng.choice([2, 2, 3])
                parts.append(f"{level} {self.name()} {level}")
            parts.append(self._marked(paragraph))
            if rng.random() < 0.25:
                parts.append(rng.choice([self._table, self._file, self._list])())
        parts.append(self._ending())
        return "\n\n".join(parts)

    def disambiguation(self, title: str) -> str:
        """A page that lists the meanings of a name."""
        entries = "\n".join(f"* [[{self.name()}]], {self.sentence(5)}" for _ in range(4))
        return f"'''{title}''' may refer to:\n\n{entries}\n\n{{{{disambiguation}}}}"

    def _opening(self, title: str) -> str:
        facts = "\n".join(
            f"| {self.noun()} = {{{{nowrap|{self._rng.randrange(1000)} [[km]]}}}} {self.noun()}"
            for _ in range(self._rng.randint(3, 12))
        )
        return (
            f"{{{{Short description|{self.sentence(5)}}}}}\n{{{{Use dmy dates|date=May 2026}}}}\n"
            f"{{{{Infobox station\n| name = {title}\n{facts}\n"
            f"| map = {{{{Location map|{self.noun()}|lat={self._rng.random():.4f}}}}}\n}}}}\n"
            f"'''{title}''' is a [[{self.noun()}]] in [[{self.name()}]].<!-- {self.sentence(6)} -->"
        )

    def _marked(self, paragraph: str) -> str:
        """The words of a paragraph among links, emphasis, references and inline templates."""
        rng, words = self._rng, paragraph.split(" ")
        draws = rng.choices(range(100), k=len(words))
        for place, draw in enumerate(draws):
            word = words[place]
            if draw < 4:
                words[place] = f"[[{self.noun().capitalize()} ({self.noun()})|{word}]]"
            elif draw < 7:
                words[place] = f"[[{word}]]"
            elif draw == 7:
                words[place] = f"''{word}''"
            elif draw == 8 and word.endswith("."):
                words[place] = word + self._reference()
            elif draw == 9:
                words[place] = f"'''{word}'''"
            elif draw == 10:
                words[place] = f"[https://example.org/{self.noun()} {word}]"
            elif draw == 11 and place + 1 < len(words):
                words[place] = f"{word}&nbsp;&ndash;"
            elif draw == 12:
                words[place] = f"{word} {{{{convert|{rng.randrange(100)}|km|mi|abbr=on}}}}"
        return " ".join(words)

    def _reference(self) -> str:
        if self._rng.random() < 0.3:
            return f'<ref name="{self.noun()}" />'
        return (
            f"<ref>{{{{cite web |url=https://example.org/{self.noun()} |title={self.sentence(6)} "
            f"|last={self.noun().capitalize()} |date=3 May 2020 |access-date=1 June 2026}}}}</ref>"
        )

    def _table(self) -> str:
        rows = "\n|-\n".join(
            "| " + " || ".join(f"[[{self.noun()}]] {self._rng.randrange(999)}" for _ in range(4))
            for _ in range(self._rng.randint(3, 10))
        )
        return (
            f'{{| class="wikitable sortable"\n|+ {self.name()}\n'
            f"! {' !! '.join(self.noun() for _ in range(4))}\n|-\n{rows}\n|}}"
        )

    def _file(self) -> str:
        return (
            f"[[File:{self.noun()}.jpg|thumb|right|220px|{self.sentence(6)} See [[{self.noun()}|"
            f"{self.noun()}]].]]"
        )

    def _list(self) -> str:
        mark = self._rng.choice("*#")
        return "\n".join(f"{mark} {self.sentence(6)}" for _ in range(self._rng.randint(2, 5)))

    def _ending(self) -> str:
        links = "\n".join(f"* [https://example.org/{self.noun()} {self.name()}]" for _ in range(2))
        groups = "\n".join(f"[[Category:{self.name()}]]" for _ in range(3))
        return (
            f"== References ==\n{{{{reflist}}}}\n\n== External links ==\n{links}\n\n"
            f"{{{{Navbox|name={self.noun()}|list1=[[{self.noun()}]] * [[{self.noun()}]]}}}}\n"
            f"{{{{DEFAULTSORT:{self.noun()}}}}}\n{groups}"
        )
