"""Rules about the language of a text, which py3langid identifies (arXiv:2105.13565 has its model's
kind; the model is in its package).

Its score is a probability of its own, not comparable with fastText's."""

from __future__ import annotations

import threading
from typing import Any

from trainyard.collection.rules.page import Drop, Page, Verdict
from trainyard.errors import ConfigError

_loading = threading.Lock()
_identifier: list[Any] = []

SEPARATOR = "+"


def identifier() -> Any:
    """The identifier, loaded once a process."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    with _loading:
        if not _identifier:
            _identifier.append(LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True))
        return _identifier[0]


def identify(text: str, chars: int) -> tuple[str, float]:
    """ISO 639 code and probability of the language of the first `chars` characters."""
    language, probability = identifier().classify(text[:chars])
    return str(language), float(probability)


def language(page: Page, keep: str = "en", min: float = 0.65, chars: int = 2000) -> Verdict:
    """Keeps texts in one of the languages of `keep`, such as en+de, with a probability of `min`;
    looks at the first `chars` characters (FineWeb, arXiv:2406.17557, section 3.2)."""
    found, probability = identify(page.text, chars)
    if found in keep.split(SEPARATOR) and probability >= min:
        return None
    return Drop(f"{found} {probability:.2f}")


def short_foreign(page: Page, keep: str = "en", limit: int = 512) -> Verdict:
    """Drops a text of fewer than `limit` characters in another language than those of `keep`
    (`remove_512_non_english` of cleanup_fix_dataset.py)."""
    if len(page.text) >= limit:
        return None
    found, _ = identify(page.text, limit)
    return None if found in keep.split(SEPARATOR) else Drop(found)


def check_languages(keep: str) -> None:
    """Refuse a language that the identifier does not know."""
    known = set(identifier().labels)
    unknown = [code for code in keep.split(SEPARATOR) if code not in known]
    if unknown:
        raise ConfigError(
            f"--rules: keep={keep}: py3langid has no language {unknown[0]!r}, only "
            f"{' '.join(sorted(known))}; join several with {SEPARATOR}"
        )
