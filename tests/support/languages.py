"""Texts in many scripts with hand-marked sentences, and facts in many languages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.scripts import extract


def _read_marked_texts() -> dict[str, list[list[str]]]:
    """Return by script its texts as lists of sentences, each with the space that follows it."""
    texts: dict[str, list[list[str]]] = {}
    for line in Path(__file__).with_name("sentences.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            sentences = texts.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            sentences.append(line.split("|")[:-1])
    return texts


TEXTS = _read_marked_texts()
SENTENCES = {script: [sentence for text in texts for sentence in text] for script, texts in TEXTS.items()} | {
    "Thai": ["หอคอยนี้เก่ามาก ", "หอคอยนี้อยู่ใกล้ทะเล ", "ทะเลอยู่ใกล้มาก ", "หอคอยเก่าอยู่ใกล้มาก ", "ทะเลนี้อยู่ใกล้หอคอย "]
}
"""By script; any order of them is a text. Thai marks no sentence ends, so it is not in `TEXTS`."""

# fmt: off
WORDS: dict[str, tuple[str, ...]] = {
    "Thai": ("หอคอย", "นี้", "เก่า", "มาก", "อยู่", "ใกล้", "ทะเล"),
    "Khmer": ("ផ្ទះ", "ថ្មី", "សមុទ្រ", "ភាសា", "សាលារៀន"),
}
"""Words of scripts that are written without spaces."""


@dataclass(frozen=True)
class Fact:
    """A sentence with a fact, and the memory and answer that a policy writes from it."""

    sentence: str
    question: str
    memory: str
    answer: str
    script: str
    """The script of the sentences around it, a key of `SENTENCES`."""


FACTS: dict[str, Fact] = {
    "English": Fact("Marta Alexan-\ndrova keeps 1,234 bees. ", "Who keeps bees?", "Alexandrova keeps 1234 bees",
        "Alexandrova", "Latin"),
    "German": Fact("Der Schlüssel liegt bei Jürgen Groß. ", "Wer hat den Schlüssel?", "Schlüssel: JÜRGEN GROSS",
        "Groß", "Latin"),
    "French": Fact("La clef est chez Hélo\u00adïse Lefèvre. ", "Où est la clef ?",
        "La clef est chez He\u0301loi\u0308se Lefe\u0300vre", "Lefèvre", "Latin"),
    "Turkish": Fact("Anahtar İstanbul'da, Işık Bey'de. ", "Anahtar nerede?", "ANAHTAR ISTANBUL", "İstanbul", "Latin"),
    "Vietnamese": Fact("Chìa khóa ở nhà Nguyễn Thị Hạnh. ", "Chìa khóa ở đâu?", "Chìa khóa: Nguyễn Thị Hạnh",
        "Nguyễn Thị Hạnh", "Latin"),
    "Russian": Fact("Ключ хранит Алёна Королёва. ", "У кого ключ?", "ключ: Алена Королева", "Королёва", "Cyrillic"),
    "Greek": Fact("Το κλειδί το έχει η Ειρήνη. ", "Ποιος έχει το κλειδί;", "ΤΟ ΚΛΕΙΔΙ ΕΧΕΙ Η ΕΙΡΗΝΗ", "Ειρήνη",
        "Greek"),
    "Arabic": Fact("المفتاح عند مُحَمَّد ورقمه ١٬٢٣٤. ", "أين المفتاح؟", "المفتاح عند محمد 1234", "محمد", "Arabic"),
    "Hebrew": Fact("המפתח אצל שָׂרָה כהן. ", "אצל מי המפתח?", "המפתח אצל שרה כהן", "שרה", "Hebrew"),
    "Urdu": Fact("چابی فاطمہ کے پاس ہے۔ ", "چابی کس کے پاس ہے؟", "چابی فاطمہ کے پاس", "فاطمہ", "Urdu"),
    "Hindi": Fact("चाबी सीता के पास १२३४ नंबर पर है। ", "चाबी किसके पास है?", "चाबी सीता के पास 1234", "सीता",
        "Devanagari"),
    "Bengali": Fact("চাবিটি ফাতেমার কাছে আছে। ", "চাবিটি কার কাছে?", "চাবিটি ফাতেমার কাছে", "ফাতেমার", "Bengali"),
    "Tamil": Fact("சாவி கண்ணனிடம் உள்ளது. ", "சாவி எங்கே?", "சாவி கண்ணனிடம்", "கண்ணனிடம்", "Tamil"),
    "Chinese": Fact("钥匙在欧阳娜娜的抽屉里。", "钥匙在哪里？", "钥匙在欧阳娜娜", "欧阳娜娜", "Han"),
    "Japanese": Fact("鍵は佐々木さんの机にある。", "鍵はどこにある？", "佐々木さんの机です", "佐々木", "Kana"),
    "Korean": Fact("열쇠는 김민수의 책상에 있다. ", "열쇠는 어디에 있나?", "열쇠: 김민수 책상", "김민수", "Hangul"),
    "Thai": Fact("กุญแจอยู่กับสมชายใจดี ", "กุญแจอยู่กับใคร", "กุญแจอยู่กับสมชาย", "สมชาย", "Thai"),
    "Burmese": Fact("သော့သည် မောင်မောင် ထံတွင်ရှိသည်။ ", "သော့ဘယ်မှာလဲ", "သော့သည် မောင်မောင်", "မောင်မောင်", "Myanmar"),
    "Khmer": Fact("សោនៅជាមួយសុវណ្ណារ៉ា។ ", "សោនៅឯណា", "សោនៅជាមួយសុវណ្ណារ៉ា", "សុវណ្ណារ៉ា", "Khmer"),
    "Amharic": Fact("ቁልፉ ከአበበ ጋር ነው። ", "ቁልፉ የት ነው፧", "ቁልፉ ከአበበ ጋር", "ከአበበ", "Ethiopic"),
    "Armenian": Fact("Բանալին Անահիտի մոտ է։ ", "Որտե՞ղ է բանալին", "բանալին Անահիտի մոտ", "Անահիտի", "Armenian"),
}
# fmt: on


def make_text(fact: Fact) -> str:
    """Return a text of many sentences with the fact in its middle."""
    surroundings = SENTENCES[fact.script][:5] * 40
    return "".join((*surroundings, fact.sentence, *surroundings))


def reply_to(prompt: str) -> str:
    """Reply as a policy that knows all the languages: keep a fact once it has been read, else copy a word."""
    fact = next((fact for fact in FACTS.values() if fact.sentence.strip() in prompt or fact.memory in prompt), None)
    if "<section>" not in prompt:
        return f"\\boxed{{{fact.answer if fact else '?'}}}"
    return fact.memory if fact else " ".join(extract(prompt, "section").split()[:1])
