"""Writes the documents anew; run it in the checkout's root."""

from tests.golden import DOCUMENTS, FOLDER, document

for name, arguments in DOCUMENTS.items():
    (FOLDER / name).write_text(document(arguments), encoding="utf-8")
