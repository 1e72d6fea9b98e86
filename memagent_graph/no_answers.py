"""Recognises answers such as "not stated", which say that the document has no answer, in several languages."""

from __future__ import annotations

import re
from typing import Final

from memagent_graph.words import fold_words

_NO_ANSWER: Final = re.compile(
    r"""(?:unknown|unclear|n/?a|\(empty\)|nothing\ (?:found|relevant|yet)|no\ answer|unanswerable
    |(?:no|insufficient)\ (?:relevant\ )?information(?:\ found|\ given|\ available)?
    |(?:it\ is\ )?not\ (?:stated|mentioned|given|specified|available|found|known|applicable|provided|answered
     |in\ (?:the\ )?memory)
    |i\ (?:do\ not|don't)\ know|(?:it\ )?cannot\ be\ (?:determined|answered)
    |(?:the\ |this\ )?(?:document|text|memory|section)s?\ (?:does|do|did)\ not
     \ (?:say|state|mention|give|contain|hold|specify|answer|provide|know)
     (?:(?!\b(?:but|however|though|although|only|except)\b)[^.,;:])*
    )[.!]*""",
    re.IGNORECASE | re.VERBOSE,
)
_NO_ANSWER_PHRASES: Final = frozenset(
    " ".join(fold_words(phrase))
    for phrase in """
    nicht angegeben|nicht genannt|nicht bekannt|unbekannt|keine Angabe|keine Antwort|nicht im Text|ich weiß es nicht
    non indiqué|non précisé|non mentionné|inconnu|aucune réponse|aucune information|je ne sais pas
    no indicado|no se indica|no especificado|no se menciona|desconocido|sin respuesta|no lo sé
    não indicado|não informado|não mencionado|desconhecido|sem resposta|não sei
    non indicato|non specificato|non menzionato|sconosciuto|nessuna risposta|non lo so
    niet vermeld|onbekend|geen antwoord|ik weet het niet|nie podano|nieznane|brak odpowiedzi|nie wiem
    не указано|неизвестно|не упоминается|нет ответа|нет данных|не знаю|не вказано|невідомо
    belirtilmemiş|bilinmiyor|cevap yok|bilmiyorum|δεν αναφέρεται|άγνωστο|δεν ξέρω
    غير مذكور|غير معروف|لا توجد إجابة|لا أعرف|لم يذكر|לא צוין|לא ידוע|אין תשובה
    نامشخص|ذکر نشده|پاسخی نیست|نمی‌دانم|معلوم نہیں|مذکور نہیں
    उल्लेख नहीं है|नहीं बताया गया|अज्ञात|पता नहीं|कोई उत्तर नहीं|উল্লেখ নেই|অজানা|জানা নেই
    未提及|未说明|未知|没有答案|无答案|不知道|未提供|未說明|沒有答案|無答案
    記載なし|不明|言及なし|回答なし|わかりません|分かりません|언급되지 않음|명시되지 않음|알 수 없음|답 없음|모름
    ไม่ได้ระบุ|ไม่ระบุ|ไม่ทราบ|ไม่มีคำตอบ|không được nêu|không rõ|không có câu trả lời|không biết
    tidak disebutkan|tidak diketahui|tidak ada jawaban|tidak tahu|haijatajwa|haijulikani|sijui
    """.strip()
    .replace("\n", "|")
    .split("|")
)
_NOTHING: Final = re.compile(r"(?:none|nothing)[.!]*", re.IGNORECASE)


def gives_no_answer(answer: str | None, *, quoted: bool = False) -> bool:
    """Return whether an answer is empty, or says that the document has no answer.

    Args:
        answer: the answer.
        quoted: whether the document has a quote for the answer. If so, "none" and "nothing" count as answers.
    """
    text = " ".join((answer or "").split())
    says_no_answer = bool(_NO_ANSWER.fullmatch(text)) or " ".join(fold_words(text)) in _NO_ANSWER_PHRASES
    return not text or says_no_answer or (not quoted and bool(_NOTHING.fullmatch(text)))
