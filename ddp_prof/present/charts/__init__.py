"""Results as Plotly figures."""
