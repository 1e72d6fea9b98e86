"""Sentences of many scripts, cut by hand, and a fact in each of some languages."""

from __future__ import annotations

from dataclasses import dataclass

from support.scripts import part

# fmt: off
SENTENCES: dict[str, tuple[str, ...]] = {
    "Latin": ("The tower is old. ", "Dr. Ito built it! ", "Who paid? ", "It cost 3.5 million. ", "“Never again.” ",
        "So it is… "),
    "Greek": ("Ο πύργος είναι παλιός. ", "Τον έχτισε ο Νίκος! ", "Κανείς δεν ξέρει. ", "Κόστισε 3,5 εκατομμύρια. "),
    "Cyrillic": ("Башня стоит у моря. ", "Кто её построил? ", "Это был Иван! ", "Она стоила 3,5 миллиона… "),
    "Hebrew": ("המגדל ישן מאוד. ", "מי בנה אותו? ", "דוד בנה אותו! ", "הוא עמד ליד הים. "),
    "Arabic": ("البرج قديم جدا. ", "من بناه؟ ", "بناه أحمد! ", "كان قرب البحر. "),
    "Urdu": ("یہ مینار پرانا ہے۔ ", "اسے کس نے بنایا؟ ", "احمد نے بنایا۔ ", "یہ سمندر کے پاس ہے۔ "),
    "Devanagari": ("यह मीनार पुरानी है। ", "इसे किसने बनाया? ", "राम ने बनाया था। ", "यह समुद्र के पास है॥ "),
    "Bengali": ("মিনারটি পুরনো। ", "কে বানিয়েছিল? ", "রহিম বানিয়েছিল। ", "এটি নদীর কাছে। "),
    "Gurmukhi": ("ਇਹ ਮੀਨਾਰ ਪੁਰਾਣੀ ਹੈ। ", "ਕਿਸ ਨੇ ਬਣਾਈ? ", "ਸਿੰਘ ਨੇ ਬਣਾਈ। ", "ਇਹ ਨਦੀ ਕੋਲ ਹੈ। "),
    "Tamil": ("கோபுரம் பழையது. ", "யார் கட்டினார்? ", "ராமன் கட்டினார்! ", "அது கடலருகே உள்ளது. "),
    "Telugu": ("గోపురం పాతది. ", "ఎవరు కట్టారు? ", "రాముడు కట్టాడు! ", "అది సముద్రం దగ్గర ఉంది. "),
    "Myanmar": ("မျှော်စင်သည် ဟောင်းသည်။ ", "ဦးလှ ဆောက်ခဲ့သည်။ ", "ပင်လယ်နားတွင် ရှိသည်။ ", "၁၈၈၉ တွင် ပြီးသည်။ "),
    "Khmer": ("ប៉មនេះចាស់ណាស់។ ", "សុខបានសាងសង់វា។ ", "វានៅជិតសមុទ្រ។ ", "វាត្រូវបានបញ្ចប់។ "),
    "Armenian": ("Աշտարակը հին է։ ", "Արամը կառուցեց։ ", "Այն ծովի մոտ է։ ", "Այն բարձր է։ "),
    "Ethiopic": ("ማማው አሮጌ ነው። ", "ማን ሠራው፧ ", "ዳዊት ሠራው። ", "ባሕር አጠገብ ነው። "),
    "Georgian": ("კოშკი ძველია. ", "ვინ ააშენა? ", "გიორგიმ ააშენა! ", "ის ზღვასთან დგას. "),
    "Han": ("这座塔很旧。", "谁建的？", "是李明建的！", "它在海边。", "他说：“不知道。”"),
    "Kana": ("塔は古いです。", "誰が建てましたか？", "田中さんです！", "「海のそばだ。」", "ｶﾅﾓｼﾞﾃﾞｽ｡"),
    "Hangul": ("탑은 오래되었다. ", "누가 지었나? ", "김 씨가 지었다! ", "바다 옆에 있다. "),
    "Tibetan": ("མཁར་འདི་རྙིང་པ་ཡིན།", "སུས་བཞེངས་སམ།", "མཚོ་འགྲམ་ན་ཡོད།", "མཐོན་པོ་འདུག།"),
}
"""Each with the space after it. Any two may follow each other."""

WORDS: dict[str, tuple[str, ...]] = {
    "Thai": ("หอคอย", "นี้", "เก่า", "มาก", "อยู่", "ใกล้", "ทะเล"),
    "Khmer": ("ផ្ទះ", "ថ្មី", "សមុទ្រ", "ភាសា", "សាលារៀន"),
}
"""Words that follow each other without a space."""


@dataclass(frozen=True)
class Fact:
    """A sentence with a fact, and what a policy that knows the language says of it."""

    sentence: str
    question: str
    memory: str
    answer: str
    script: str
    """The name of the sentences around it."""


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
    "Thai": Fact("กุญแจอยู่กับสมชายใจดี ", "กุญแจอยู่กับใคร", "กุญแจอยู่กับสมชาย", "สมชาย", "Hangul"),
    "Burmese": Fact("သော့သည် မောင်မောင် ထံတွင်ရှိသည်။ ", "သော့ဘယ်မှာလဲ", "သော့သည် မောင်မောင်", "မောင်မောင်", "Myanmar"),
    "Khmer": Fact("សោនៅជាមួយសុវណ្ណារ៉ា។ ", "សោនៅឯណា", "សោនៅជាមួយសុវណ្ណារ៉ា", "សុវណ្ណារ៉ា", "Khmer"),
    "Amharic": Fact("ቁልፉ ከአበበ ጋር ነው። ", "ቁልፉ የት ነው፧", "ቁልፉ ከአበበ ጋር", "ከአበበ", "Ethiopic"),
    "Armenian": Fact("Բանալին Անահիտի մոտ է։ ", "Որտե՞ղ է բանալին", "բանալին Անահիտի մոտ", "Անահիտի", "Armenian"),
}
# fmt: on


def document(fact: Fact) -> str:
    """A text of many sentences with the fact in its middle, once."""
    around = SENTENCES[fact.script] * 40
    return "".join((*around, fact.sentence, *around))


def reply_to(prompt: str) -> str:
    """Reply as a policy that knows all the languages: it keeps a fact once a section has it, and else copies."""
    fact = next((fact for fact in FACTS.values() if fact.sentence.strip() in prompt or fact.memory in prompt), None)
    if "<section>" not in prompt:
        return f"\\boxed{{{fact.answer if fact else '?'}}}"
    return fact.memory if fact else part(prompt, "section").split()[0]
