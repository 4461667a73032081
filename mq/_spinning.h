/* What the extension module has of _spinning.c, where there is epoll. */

#include <Python.h>

#pragma GCC visibility push(hidden)
extern PyType_Spec spinner_spec;
#pragma GCC visibility pop
