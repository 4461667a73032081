/* The arrival of a small message that somebody waits for: a frame of its own.

   See `Subscriber.data` of mq/mesh/subscriber.py, which does all that is not as simple. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "_alone.h"

#define HEADER_BYTES 20 /* mq.mesh.wire.HEADER */
#define ALONE_BYTES 28  /* mq.mesh.wire.ALONE */
#define MAX_SEQUENCE INT64_MAX

static PyTypeObject *run_type, *arrivals_type;
static PyObject *none_taken;
static PyObject *str_active, *str_append, *str_areas, *str_arrivals, *str_copying, *str_counted,
    *str_first, *str_granted_bytes, *str_granted_messages, *str_keep, *str_nbytes, *str_source,
    *str_sources, *str_taken, *str_times;

/* `mq.mesh.wire.ALONE`, after the head of a frame. */
typedef struct {
    uint32_t subscription, nbytes;
    int64_t first;
    double published_at;
} Alone;

static int
parse(PyObject *head, Alone *alone)
{
    if (!PyBytes_CheckExact(head) || PyBytes_GET_SIZE(head) < HEADER_BYTES + ALONE_BYTES)
        return 0;
    const unsigned char *at = (const unsigned char *)PyBytes_AS_STRING(head) + HEADER_BYTES;
    uint64_t numbers[4] = {0};
    static const int sizes[] = {4, 4, 8, 8};
    for (int n = 0; n < 4; at += sizes[n++])
        for (int byte = sizes[n]; byte-- > 0;)
            numbers[n] = numbers[n] << 8 | at[byte];
    memcpy(&alone->published_at, &numbers[3], sizeof alone->published_at);
    alone->subscription = (uint32_t)numbers[0];
    alone->nbytes = at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24;
    alone->first = (int64_t)numbers[2];
    return numbers[1] == 1 && numbers[2] < MAX_SEQUENCE
           && PyBytes_GET_SIZE(head) - HEADER_BYTES - ALONE_BYTES == alone->nbytes;
}

/* Whether an attribute is this object; -1: an exception. */
static int
is_so(PyObject *owner, PyObject *name, PyObject *wanted)
{
    PyObject *found = PyObject_GetAttr(owner, name);
    Py_XDECREF(found);
    return found == NULL ? -1 : found == wanted;
}

/* Whether a number is less than an attribute; -1: an exception. */
static int
is_below(long long number, PyObject *owner, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(owner, name);
    long long most = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return most == -1 && PyErr_Occurred() ? -1 : number < most;
}

/* The source that a frame is of, a new reference, where it takes all in order. */
static PyObject *
source_of(PyObject *by_id, PyObject *session, const Alone *alone)
{
    PyObject *id = PyLong_FromUnsignedLong(alone->subscription);
    /* Held, as what a lookup runs may let it go. */
    PyObject *known = id == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(by_id, id));
    Py_XDECREF(id);
    PyObject *sources = NULL;
    if (known != NULL && is_so(known, str_keep, Py_None) == 1)
        sources = PyObject_GetAttr(known, str_sources);
    Py_XDECREF(known);
    PyObject *source = sources == NULL ? NULL : PyDict_GetItemWithError(sources, session);
    Py_XINCREF(source);
    Py_XDECREF(sources);
    if (source != NULL && is_so(source, str_active, Py_True) != 1)
        Py_CLEAR(source);
    return source;
}

/* What comes after the newest that has arrived; NULL: it is not that, or has no credit. */
static PyObject *
next_state(PyObject *source, PyObject *arrivals, const Alone *alone)
{
    /* None before the publisher has answered. */
    PyObject *state = PyObject_Size(arrivals) > 0 ? PySequence_GetItem(arrivals, 0) : NULL;
    long long newest, messages, nbytes;
    int sound = state != NULL && PyArg_ParseTuple(state, "LLL", &newest, &messages, &nbytes)
                && newest + 1 == alone->first
                && is_below(messages, source, str_granted_messages) == 1
                && is_below(nbytes, source, str_granted_bytes) == 1;
    Py_XDECREF(state);
    if (!sound)
        return NULL;
    PyObject *args = Py_BuildValue("((LLL))", alone->first, messages + 1, nbytes + alone->nbytes);
    state = args == NULL ? NULL : PyTuple_Type.tp_new(arrivals_type, args, NULL);
    Py_XDECREF(args);
    return state;
}

static int
set(PyObject *owner, PyObject *name, PyObject *value)
{
    int failed = value == NULL ? -1 : PyObject_SetAttr(owner, name, value);
    Py_XDECREF(value);
    return failed;
}

/* The message itself, read-only. */
static PyObject *
areas_of(PyObject *head)
{
    PyObject *whole = PyMemoryView_FromObject(head);
    PyObject *start = PyLong_FromLong(HEADER_BYTES + ALONE_BYTES);
    PyObject *slice = start == NULL ? NULL : PySlice_New(start, NULL, NULL);
    PyObject *area = slice == NULL || whole == NULL ? NULL : PyObject_GetItem(whole, slice);
    Py_XDECREF(whole);
    Py_XDECREF(start);
    Py_XDECREF(slice);
    return area == NULL ? NULL : Py_BuildValue("[N]", area);
}

/* `Run` of mq/mesh/incoming.py. */
static PyObject *
new_run(PyObject *source, PyObject *head, const Alone *alone)
{
    PyObject *run = run_type->tp_alloc(run_type, 0);
    if (run == NULL)
        return NULL;
    if (set(run, str_source, Py_NewRef(source)) < 0
        || set(run, str_first, PyLong_FromLongLong(alone->first)) < 0
        || set(run, str_times, Py_BuildValue("(d)", alone->published_at)) < 0
        || set(run, str_areas, areas_of(head)) < 0
        || set(run, str_nbytes, PyLong_FromUnsignedLong(alone->nbytes)) < 0
        || set(run, str_copying, Py_NewRef(Py_None)) < 0
        || set(run, str_taken, Py_NewRef(none_taken)) < 0
        || set(run, str_counted, Py_NewRef(none_taken)) < 0)
        Py_CLEAR(run);
    return run;
}

static int
append(PyObject *queue, PyObject *item)
{
    PyObject *done = PyObject_CallMethodOneArg(queue, str_append, item);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyObject *
arrive_alone(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5 || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "arrive_alone(head, session, by_id, limit, fifo)");
        return NULL;
    }
    Alone alone;
    long long limit = PyLong_AsLongLong(args[3]);
    if (limit == -1 && PyErr_Occurred())
        return NULL;
    if (run_type == NULL || !parse(args[0], &alone) || alone.nbytes > limit)
        Py_RETURN_FALSE;
    PyObject *source = source_of(args[2], args[1], &alone);
    PyObject *arrivals = source == NULL ? NULL : PyObject_GetAttr(source, str_arrivals);
    PyObject *state = arrivals == NULL ? NULL : next_state(source, arrivals, &alone);
    PyObject *run = state == NULL ? NULL : new_run(source, args[0], &alone);
    /* Both or none: whatever may run code of Python's is done. */
    int done = run != NULL && append(args[4], run) == 0 && append(arrivals, state) == 0;
    Py_XDECREF(source);
    Py_XDECREF(arrivals);
    Py_XDECREF(state);
    Py_XDECREF(run);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

PyObject *
know_arrivals(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyType_Check(args[0]) || !PyType_Check(args[1])
        || !PyType_IsSubtype((PyTypeObject *)args[1], &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "know_arrivals(Run, Arrivals)");
        return NULL;
    }
    Py_XSETREF(run_type, (PyTypeObject *)Py_NewRef(args[0]));
    Py_XSETREF(arrivals_type, (PyTypeObject *)Py_NewRef(args[1]));
    Py_RETURN_NONE;
}

int
intern_alone(void)
{
    return (none_taken = PyLong_FromLong(0)) != NULL
           && (str_active = PyUnicode_InternFromString("active")) != NULL
           && (str_append = PyUnicode_InternFromString("append")) != NULL
           && (str_areas = PyUnicode_InternFromString("areas")) != NULL
           && (str_arrivals = PyUnicode_InternFromString("arrivals")) != NULL
           && (str_copying = PyUnicode_InternFromString("copying")) != NULL
           && (str_counted = PyUnicode_InternFromString("counted")) != NULL
           && (str_first = PyUnicode_InternFromString("first")) != NULL
           && (str_granted_bytes = PyUnicode_InternFromString("granted_bytes")) != NULL
           && (str_granted_messages = PyUnicode_InternFromString("granted_messages")) != NULL
           && (str_keep = PyUnicode_InternFromString("keep")) != NULL
           && (str_nbytes = PyUnicode_InternFromString("nbytes")) != NULL
           && (str_source = PyUnicode_InternFromString("source")) != NULL
           && (str_sources = PyUnicode_InternFromString("sources")) != NULL
           && (str_taken = PyUnicode_InternFromString("taken")) != NULL
           && (str_times = PyUnicode_InternFromString("times")) != NULL;
}
