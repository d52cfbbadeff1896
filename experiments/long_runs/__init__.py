"""What a run of weeks must withstand, tried: kills, saving, starving, endurance."""
