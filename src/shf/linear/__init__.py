"""The system (B + λI)δ = -∇f, and what solves it. No network here."""
