"""Names and sentences as Markdown and as LaTeX, so that no character of a name is markup.

Used for every table of the report and for the model card. LaTeX compiles with pdflatex and the package booktabs alone.
"""

from __future__ import annotations

import html
import unicodedata

SPECIAL = {letter: rf"\{letter}" for letter in "&%_#${}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "[": "{[}",  # after the end of a row, a bracket or a star would be an argument of it
    "]": "{]}",
    "*": "{*}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    '"': "{''}",
    "'": "{'}",  # braces keep two quotes from becoming one
    "`": "{`}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "÷": r"$\div$",
    "−": "$-$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "≠": r"$\neq$",
    "≈": r"$\approx$",
    "∞": r"$\infty$",
    "→": r"$\rightarrow$",
    "←": r"$\leftarrow$",
    "↔": r"$\leftrightarrow$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "°": r"$^\circ$",
    "µ": r"$\mu$",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "‘": "{`}",
    "’": "{'}",
    "“": "{``}",
    "”": "{''}",
    "§": r"\S{}",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
    "œ": r"\oe{}",
    "Œ": r"\OE{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
    "ı": r"\i{}",
}
ACCENTS = {  # combining character -> accent of LaTeX
    "\u0300": "`",
    "\u0301": "'",
    "\u0302": "^",
    "\u0303": "~",
    "\u0304": "=",
    "\u0306": "u",
    "\u0307": ".",
    "\u0308": '"',
    "\u030a": "r",
    "\u030b": "H",
    "\u030c": "v",
    "\u0327": "c",
}
GREEK = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi", "pi"),
    *("rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
)
CAPITALS = ("gamma", "delta", "theta", "lambda", "xi", "pi", "sigma", "upsilon", "phi", "psi", "omega")  # unlike Latin ones


def markdown(text: str) -> str:
    """Text on one line, with markup and HTML escaped."""
    safe = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{letter}" if letter in "\\`*[]|" else letter for letter in safe)


def latex(text: str) -> str:
    """Text on one line for pdflatex; a character that its fonts lack is written as its code point, such as [U+6F22]."""
    return "".join(map(_letter, unicodedata.normalize("NFC", " ".join(text.split()))))


def _letter(letter: str) -> str:
    if letter in SPECIAL:
        return SPECIAL[letter]
    if " " <= letter <= "~":
        return letter
    return _accented(letter) or _greek(letter) or _raised(letter) or f"{{[}}U+{ord(letter):04X}{{]}}"


def _accented(letter: str) -> str:
    """A Latin letter with accents; empty for other characters."""
    parts = unicodedata.normalize("NFD", letter)
    base, marks = parts[0], parts[1:]
    if not marks or not base.isascii() or not base.isalpha() or any(mark not in ACCENTS for mark in marks):
        return ""
    for mark in marks:
        base = rf"\{ACCENTS[mark]}{{{base}}}"
    return base


def _greek(letter: str) -> str:
    """A Greek letter in mathematics; empty for other characters."""
    words = unicodedata.name(letter, "").lower().replace("lamda", "lambda").split()
    if len(words) != 4 or words[:1] + words[2:3] != ["greek", "letter"] or words[3] not in GREEK:
        return ""
    if words[1] == "small":
        return rf"$\{words[3]}$"
    return rf"$\{words[3].capitalize()}$" if words[3] in CAPITALS else ""


def _raised(letter: str) -> str:
    """A raised or lowered digit or sign in mathematics; empty for other characters."""
    kind, _, digit = unicodedata.decomposition(letter).partition(" ")
    if kind not in ("<super>", "<sub>") or len(digit) != 4 or not (plain := chr(int(digit, 16))).isascii():
        return ""
    return f"${'^' if kind == '<super>' else '_'}{{{plain}}}$" if plain.isalnum() or plain in "+-=()" else ""
