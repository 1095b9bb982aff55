@rem Checks a GPU end to end: see gpu-check, which does the same for other shells.
@set PYTHONPATH=%~dp0..;%PYTHONPATH%
@py -3 "%~dp0..\pyharness\base\build.py" gpucheck %*
