"""Bytes that are not UTF-8 are decoded with the charset that is usual for their language."""

import pytest

from memagent_graph.documents.decoding import detect_charset

WESTERN_EUROPEAN = {
    "French": "L'été dernier, François a visité la forêt. Il a déjà écrit à sa mère où il était allé, très froid.",
    "German": "Der alte Müller hörte die Vögel über den Bäumen und mußte früh aufstehen, die Äpfel zu pflücken.",
    "Spanish": "El niño pequeño comió una manzana mañana. ¿Dónde está el baño? La canción fue escrita en España.",
    "Portuguese": "A situação não é fácil: as eleições serão em março, e os cidadãos têm opiniões sobre a educação.",
    "Italian": "Perché la città è così bella? Già nel Cinquecento si diceva che più di ogni virtù contava la libertà.",
    "Swedish": "På våren är det vackert här. Många människor går ut på ängarna, och på kvällen sjunger fåglarna.",
    "Danish": "På øen bor der mange får, og om foråret går bønderne ud på markerne og råber, når de får æbler.",
    "English": "The café’s “naïve” owner — a fiancé of the señora — paid £5 for the crème brûlée, he said…",
}
CENTRAL_EUROPEAN = {
    "Polish": "Wczoraj wieczorem poszedłem do sklepu, żeby kupić świeże bułki. Było już późno, więc źle się czułem.",
    "Czech": "Včera večer jsem šel do obchodu, abych koupil čerstvé pečivo. Bylo už pozdě, příště přijdu dříve.",
    "Hungarian": "Tegnap este elmentem a boltba. Már késő volt, a legtöbb üzlet zárva; őszi eső, gyűrű, nővér.",
    "Croatian": "Jučer sam otišao u dućan. Već je bilo kasno pa je većina dućana zatvorena, što me žao začudilo.",
}
BALTIC = {
    "Lithuanian": "Vakar vakare nuėjau į parduotuvę nusipirkti šviežių bandelių. Jau buvo vėlu, žinoma, ąžuolas ūžė.",
    "Latvian": "Vakar vakarā es gāju uz veikalu, lai nopirktu svaigas maizītes. Bija jau vēls, šķiet, man žēl.",
    "Estonian": "Eile õhtul läksin poodi. Oli juba hilja, õues sadas vihma, öö tuli, šokolaad, köök ja õun.",
}
TURKISH = "Dün akşam taze ekmek almak için dükkâna gittim. Artık çok geçti, şimdi ığdır güzel, İzmir de öyle."
RUSSIAN = "Вчера вечером я пошёл в магазин, чтобы купить хлеба и молока."
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。"


@pytest.mark.parametrize("repetitions", [1, 200])
@pytest.mark.parametrize(
    ("charset", "text"),
    [("cp1252", text) for text in WESTERN_EUROPEAN.values()]
    + [("cp1250", text) for text in CENTRAL_EUROPEAN.values()]
    + [("cp1257", text) for text in BALTIC.values()]
    + [("cp1254", TURKISH)]
    + [("cp1251", RUSSIAN), ("koi8-r", RUSSIAN), ("shift_jis", JAPANESE)],
    ids=[*WESTERN_EUROPEAN, *CENTRAL_EUROPEAN, *BALTIC, "Turkish", "Russian", "Russian in KOI8", "Japanese"],
)
def test_a_text_is_read_in_the_charset_of_its_language(charset, text, repetitions):
    data = (text * repetitions).encode(charset)
    detected_charset = detect_charset(data[:65_536])
    assert detected_charset is not None
    assert data.decode(detected_charset) == text * repetitions
