"""Writes the documents anew whose figures changed; run it in the checkout's root."""

from tests.golden import DOCUMENTS, FOLDER, document, rounded

for name, arguments in DOCUMENTS.items():
    file, text = FOLDER / name, document(arguments)
    if not file.exists() or rounded(text) != rounded(file.read_text(encoding="utf-8")):
        file.write_text(text, encoding="utf-8")
