"""Documents like filings of companies, generated with the truth of every field.

A filing has a cover, sections on business and risks, a discussion of results, an auditor's report and signatures. Each
fact has several wordings. Around the facts stand others of the same kind that are not the answer: last year's revenue,
a segment's, a competitor's staff, a former auditor. Paragraphs are invented, so no policy has seen them.
"""

from __future__ import annotations

import calendar
import datetime
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, Field

QUESTION: Final = "What does the company report for the period of this filing?"
_FIRST: Final = (
    *("Aldren", "Borvik", "Calden", "Dorwen", "Estmar", "Farrow", "Gildan"),
    *("Harvik", "Iskren", "Jorund", "Kelmar", "Lorvan", "Mesrin", "Norvald"),
)
_SECOND: Final = (
    *("Steel", "Foods", "Marine", "Optics", "Paper", "Rail", "Salt"),
    *("Textiles", "Timber", "Tools", "Water", "Instruments", "Cement", "Glass"),
)
_LAST: Final = ("Inc.", "Corporation", "Group", "Holdings", "Partners", "Works", "Company", "Trust")
_AUDITORS: Final = (
    *("Abelard & Finch LLP", "Cotter Mayhew LLP", "Dunmore Partners", "Ostrander & Vale LLP", "Pryce Lindqvist LLP"),
    *("Quill, Harrow & Co.", "Tamsin Rook LLP", "Weyland Brothers"),
)
_RISKS: Final = (
    *("Dependence on few customers", "Shortage of raw materials", "Changes in exchange rates", "Cyber attacks"),
    *("Loss of key personnel", "Stricter environmental rules", "Competition from abroad", "Pending litigation"),
    *("Rising cost of energy", "Product recalls", "Failure of acquisitions", "Natural disasters at our sites"),
)
_SIGNS: Final = {"USD": "$", "EUR": "€", "GBP": "£", "CHF": "CHF "}
_NAMES: Final = {"USD": "U.S. dollars", "EUR": "euros", "GBP": "pounds sterling", "CHF": "Swiss francs"}
_REASONS: Final = ("higher volumes", "two new plants", "better prices", "a mild winter", "an order of the navy")
_PLACES: Final = ("the northern region", "our overseas markets", "the coastal states", "the eastern plants")
_TOPICS: Final = ("warehouses", "delivery times", "leases", "pension plans", "spare parts", "inventories", "permits")

Scale = Literal["millions", "thousands", "billions"]
"""The unit in which a filing states its revenue."""


class Filing(BaseModel):
    """What is asked of each filing; the schema of the table."""

    company: str = Field(description="the name of the company that files")
    form: Literal["annual", "quarterly"]
    period_end: datetime.date = Field(description="the last day of the period, as YYYY-MM-DD")
    currency: Literal["USD", "EUR", "GBP", "CHF"]
    revenue: float = Field(description="total revenue of the period, in millions of the currency")
    net_income: float | None = Field(description="in millions of the currency; negative for a loss; null if not stated")
    employees: int | None = Field(description="of the company itself, at the end of the period; null if not stated")
    auditor: str = Field(description="the firm that audited this period, not a former one")
    risks: list[str] = Field(description="the headings under Risk Factors, in order")
    material_weakness: bool = Field(description="whether a material weakness in internal control is reported")


@dataclass(frozen=True, slots=True)
class GeneratedFiling:
    """A filing's text, its truth, and what makes it hard."""

    name: str
    """The file's name."""
    text: str
    truth: Filing
    scale: Scale
    changed_auditor: bool
    """Whether a former auditor is named first."""
    wording: int
    """0 to 2: how its sentences are put."""


def filings(count: int, *, seed: int = 23, words: int = 1500) -> Iterator[GeneratedFiling]:
    """Filings, made one by one; equal arguments give equal ones.

    Args:
        count: how many.
        seed: of all random choices.
        words: about how many words each has, half to double that.
    """
    for number in range(count):
        yield _filing(number, random.Random(f"{seed}/{number}"), words)


def write_filings(folder: Path, count: int, *, seed: int = 23, words: int = 1500) -> dict[str, GeneratedFiling]:
    """Write filings to a folder, and return them by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    filings_by_name = {}
    for filing in filings(count, seed=seed, words=words):
        (folder / filing.name).write_text(filing.text, encoding="utf-8")
        filings_by_name[filing.name] = filing
    return filings_by_name


def _filing(number: int, rng: random.Random, words: int) -> GeneratedFiling:
    form: Literal["annual", "quarterly"] = "annual" if rng.random() < 0.6 else "quarterly"
    year, month = rng.randint(2004, 2024), rng.choice((3, 6, 9, 12))
    currency = rng.choice(list(_SIGNS))
    truth = Filing.model_validate(
        {
            "company": f"{rng.choice(_FIRST)} {rng.choice(_SECOND)} {rng.choice(_LAST)}",
            "form": form,
            "period_end": datetime.date(year, month, calendar.monthrange(year, month)[1]),
            "currency": currency,
            "revenue": round(rng.uniform(12, 9000), 1),
            "net_income": None if rng.random() < 0.15 else round(rng.uniform(-150, 400), 1) or 1.0,
            "employees": None if rng.random() < 0.2 else rng.randint(40, 60_000),
            "auditor": rng.choice(_AUDITORS),
            "risks": rng.sample(_RISKS, rng.randint(1, 6)),
            "material_weakness": rng.random() < 0.2,
        }
    )
    scale: Scale = rng.choices(("millions", "thousands", "billions"), (5, 3, 2))[0]
    changed, wording = rng.random() < 0.25, rng.randrange(3)
    text = _Text(truth, scale, changed, wording, rng, words // 2 + rng.randrange(max(1, words))).written()
    return GeneratedFiling(f"filing-{number:05d}.txt", text, truth, scale, changed, wording)


class _Text:
    """The text of one filing."""

    def __init__(
        self, truth: Filing, scale: Scale, changed_auditor: bool, wording: int, rng: random.Random, words: int
    ) -> None:
        self._truth, self._scale, self._changed, self._wording = truth, scale, changed_auditor, wording
        self._chance, self._words = rng, words
        self._ended = f"{truth.period_end:%B} {truth.period_end.day}, {truth.period_end.year}"
        self._period = "fiscal year" if truth.form == "annual" else "quarter"

    def written(self) -> str:
        """All of it."""
        sections = (
            self._cover(),
            ["Item 1. Business", *self._business()],
            ["Item 1A. Risk Factors", *self._risks()],
            ["Item 7. Discussion of Results", *self._results()],
            ["Item 8. Report of the Auditor", *self._audit()],
            ["Item 9A. Controls and Procedures", *self._controls()],
            ["Signatures", f"Signed on behalf of {self._truth.company} by its treasurer."],
        )
        filler = self._words // (40 * (len(sections) - 2))
        paragraphs = list[str]()
        for index, section in enumerate(sections):
            paragraphs += section
            if 0 < index < len(sections) - 1:
                paragraphs += (self._filler() for _ in range(filler))
        return "\n\n".join(paragraphs) + "\n"

    def _cover(self) -> list[str]:
        kind = "Annual report" if self._truth.form == "annual" else "Quarterly report"
        return [
            self._truth.company,
            f"{kind} for the {self._period} ended {self._ended}",
            f"All amounts are in {_NAMES[self._truth.currency]} unless stated otherwise.",
        ]

    def _business(self) -> Iterator[str]:
        yield f"{self._truth.company} makes and sells products for industry and households in {self._place()}."
        rival = f"{self._chance.choice(_FIRST)} Rivals Ltd"
        yield f"Our largest competitor, {rival}, is said to have {self._chance.randint(40, 60_000):,} workers."
        if self._truth.employees is not None:
            staff = f"{self._truth.employees:,}"
            yield (
                f"At the end of the {self._period} we had {staff} employees.",
                f"We employed {staff} people as of {self._ended}.",
                f"Our workforce numbered {staff} on the last day of the period.",
            )[self._wording]

    def _risks(self) -> Iterator[str]:
        for risk in self._truth.risks:
            yield f"Risk: {risk}"
            yield f"This could harm our results in {self._place()}, and we may be unable to prevent it."

    def _results(self) -> Iterator[str]:
        truth, previous = self._truth, self._truth.revenue * self._chance.uniform(0.6, 0.95)
        yield f"Revenue of the segment {self._chance.choice(_SECOND)} was {self._amount(truth.revenue * 0.3)}."
        yield f"In the same period of the year before, total revenue had been {self._amount(previous)}."
        current = self._amount(truth.revenue)
        yield (
            f"Total revenue for the {self._period} ended {self._ended} was {current}, owing to {self._reason()}.",
            f"We achieved total revenue of {current} in the {self._period}, after {self._amount(previous)} before.",
            f"Owing to {self._reason()}, total revenue rose to {current}.",
        )[self._wording]
        if truth.net_income is not None:
            sign = _SIGNS[truth.currency]
            amount = f"{sign}{abs(truth.net_income):,.1f} million"
            loss = truth.net_income < 0
            yield (
                f"Net {'loss' if loss else 'income'} was {amount}.",
                f"The {self._period} ended with a net {'loss' if loss else 'income'} of {amount}.",
                f"Net income (loss): {f'({amount})' if loss else amount}.",
            )[self._wording]

    def _audit(self) -> Iterator[str]:
        if self._changed:
            former = self._chance.choice([auditor for auditor in _AUDITORS if auditor != self._truth.auditor])
            yield f"{former} audited our statements of earlier years and was dismissed during the period."
        auditor = self._truth.auditor
        yield (
            f"{auditor} audited the statements for the {self._period} ended {self._ended}.",
            f"The accompanying statements of this {self._period} were audited by {auditor}, independent accountants.",
            f"In our opinion the statements present fairly the position of the company. {auditor}",
        )[self._wording]

    def _controls(self) -> Iterator[str]:
        if self._truth.material_weakness:
            yield "Management identified a material weakness in internal control over financial reporting."
        else:
            yield "Management concluded that internal control was effective; it found no material weakness."

    def _amount(self, millions: float) -> str:
        sign = _SIGNS[self._truth.currency]
        match self._scale:
            case "millions":
                return f"{sign}{millions:,.1f} million"
            case "thousands":
                return f"{sign}{millions * 1000:,.0f} thousand"
            case _:
                return f"{sign}{millions / 1000:,.4f} billion"

    def _reason(self) -> str:
        return self._chance.choice(_REASONS)

    def _place(self) -> str:
        return self._chance.choice(_PLACES)

    def _filler(self) -> str:
        """About 40 words that state nothing that is asked for, with numbers in them."""
        rng = self._chance
        topic, other_topic = rng.sample(_TOPICS, 2)
        return (
            f"Our {topic} in {self._place()} were reviewed in {rng.randint(1990, 2024)}, and {rng.randint(2, 99)} "
            f"of them were renewed. The cost of {other_topic} changed by {rng.uniform(0.1, 9):.1f} percent, which we "
            f"ascribe to {self._reason()}. See note {rng.randint(1, 30)} on {topic} and {other_topic}."
        )
