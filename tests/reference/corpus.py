"""The text that the tokenizers of this folder are compared on: documents of mixed scripts, code and blanks. The Rust
tests make the same ones from tokenizers/corpus.json.
"""
N_DOCUMENTS, DOCUMENT_BYTES = 66, 16_000

SNIPPETS = [
    "The quick brown fox jumps over the lazy dog. ", "It's 2026, and we've said: \"don't!\" They'll come; I'M HERE'S. ",
    "In 1234567890 years, 3.14159 + 2.71828 = 5.85987; 0xDEADBEEF, 1e-9, 12,345,678 items. ",
    "def f(x: int) -> str:\n    return f\"{x!r:>10}\"\n\n\nclass A(B):\n\tpass\n",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; } // loop\n",
    "fn main() -> Result<(), Box<dyn Error>> {\n        Ok(())\n}\n",
    "SELECT * FROM `users` WHERE id != 7 AND name LIKE '%\\_x%';\n", "<div class=\"a b\">&nbsp;&lt;text&gt;</div>\r\n",
    "{\"key\": [1, 2.5, null, true], \"k2\": \"\\u00e9\\n\"}", "https://example.org/a/b?c=d&e=%20f#g ",
    "user@example.com ",
    "漢字かな交じり文。日本語のテキスト、カタカナ・ヒラガナ。", "中文文本，包含标点符号！“引号”和《书名》。", "한국어 텍스트입니다. 안녕하세요! ",
    "Привет, мир! Как дела? ", "Ελληνικά κείμενα: αβγδ ΑΒΓΔ. ", "مرحبا بالعالم، كيف حالك؟ ", "שלום עולם ",
    "สวัสดีชาวโลก ",
    "नमस्ते दुनिया। ", "Zażółć gęślą jaźń. ", "Crème brûlée, naïve façade, Ångström, Übergröße, ﬁne ﬀ ",
    "e\u0301 o\u0308 n\u0303 \u0041\u030a ",
    "😀😃👍🏽👨‍👩‍👧‍👦🇩🇪🏳️‍🌈 ", "♥️ ✓ → ∑∫√≈ ½ ² ³ ⅷ Ⅷ ① ٣٤٥ ", "\u200b\u200d\ufeff\u00ad\u2060",
    "\ufffd\ufffe\uffff\u0000\u0001\u007f\u0085\ue000",
    "\U0001d49c\U0001d4b7\U0001d4b8 \U00020000\U0002a6d6 \U0010fffd ", "  ", "    ", "\t", "\t\t", "\n", "\n\n",
    "\r\n", " \n ", "   \n\n   ", "\u00a0",
    "\u3000", "\u2003", "\u2028", " ", "a", "A", "1", "12", "1234", "!", "...", "?!?!", "---", "___", "''", "'", "\"",
    "```", "$x^2$", "#!/bin/sh\n",
    "<|endoftext|>", "<|im_start|>user\n", "<|im_end|>\n", "<s>", "</s>", "<unk>", "<tool>", "<|im_", "|>", "[INST] ",
    " [/INST]", "▁", "▁▁", "<0x0A>",
    "Ġ", "ĠĊ", "Don'T 'S 'lL", "HTTPServer2XML parseURL_v2 snake_case CamelCase SCREAMING_CASE ", "aaaaaaaaaaaaaaaa",
    "................", "0000000000",
    "supercalifragilisticexpialidocious antidisestablishmentarianism ", "ไม่มีช่องว่างระหว่างคำ", "ㅋㅋㅋㅋ", "１２３ＡＢＣ",
    "ǅ ǈ ʰ ª º ",
]


class Random:
    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % n


def documents():
    random = Random(2026)
    for _ in range(N_DOCUMENTS):
        text = ""
        while len(text.encode()) < DOCUMENT_BYTES:
            snippet = SNIPPETS[random.below(len(SNIPPETS))]
            if random.below(4) == 0:
                snippet = snippet[:1 + random.below(len(snippet))]
            text += snippet
        yield text
