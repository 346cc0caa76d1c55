"""Pictures of what a recipe does: its pipeline schedule, and its mesh. No torch here."""
