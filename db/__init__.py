"""Results and their meaning: storage, change points, comparison, diagnosis, alerts.

Runs without torch, triton or streamlit. Read `models.py` first: it is the vocabulary; then
`ingest.py` for how a result tree becomes rows and `queries.py` for how rows become records.
"""
