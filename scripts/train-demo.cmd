@rem Trains a small model with flash attention off and on: see train-demo, which does the same for other shells.
@set PYTHONPATH=%~dp0..;%PYTHONPATH%
@py -3 "%~dp0..\pyharness\base\build.py" train %*
