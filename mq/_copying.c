/* Copies of large memory: by several threads, and of what others are still writing. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_copying.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

static inline int64_t
nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* For a moment, so that who shares the core is faster. */
static inline void
relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* -- copies by several threads ---------- */

#define SLICE ((size_t)512 * 1024)
#define MOST_HELPERS 3 /* of one copy */
#define MOST_CREW 15   /* of all copies at once */
#define EXPECTED_NS 150000 /* several times what publish does until it copies */
#define IDLE_SECONDS 1 /* of a helper; starting it anew takes 30 to 60 us */

typedef struct Job {
    char *target;
    const char *source;
    size_t nbytes;
    int streams;        /* whether the target is not to go through the cache */
    atomic_size_t next; /* first byte that nobody has taken */
    atomic_size_t left; /* bytes that are not there yet */
    atomic_int users;   /* who comes last frees it, maybe after Python has ended */
    struct Job *older;  /* with the crew's lock */
} Job;

/* memcpy past the cache: what is copied would not be in it any more when somebody reads
   it, and without that each line of the target need not be read first. */
static void
stream(char *target, const char *source, size_t nbytes)
{
#ifdef __SSE2__
    size_t skew = -(uintptr_t)target & 63;
    if (skew <= nbytes) {
        memcpy(target, source, skew);
        target += skew;
        source += skew;
        nbytes -= skew;
        for (; nbytes >= 64; nbytes -= 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)source);
            __m128i b = _mm_loadu_si128((const __m128i *)source + 1);
            __m128i c = _mm_loadu_si128((const __m128i *)source + 2);
            __m128i d = _mm_loadu_si128((const __m128i *)source + 3);
            _mm_stream_si128((__m128i *)target, a);
            _mm_stream_si128((__m128i *)target + 1, b);
            _mm_stream_si128((__m128i *)target + 2, c);
            _mm_stream_si128((__m128i *)target + 3, d);
            target += 64;
            source += 64;
        }
        _mm_sfence(); /* before anybody is told that it is there */
    }
#endif
    memcpy(target, source, nbytes);
}

static void
copy_part(char *target, const char *source, size_t nbytes, int streams)
{
    if (streams)
        stream(target, source, nbytes);
    else
        memcpy(target, source, nbytes);
}

static void
copy_slices(Job *job)
{
    size_t start;
    while ((start = atomic_fetch_add(&job->next, SLICE)) < job->nbytes) {
        size_t size = job->nbytes - start < SLICE ? job->nbytes - start : SLICE;
        copy_part(job->target + start, job->source + start, size, job->streams);
        atomic_fetch_sub(&job->left, size);
    }
}

static void
leave(Job *job)
{
    if (atomic_fetch_sub(&job->users, 1) == 1)
        free(job);
}

/* Threads that help to copy. They stay for a while, since starting one takes as long as
   copying megabytes, and sleep meanwhile. Nobody waits for one that comes late. */
typedef struct {
    pid_t tid; /* 0 until it runs */
    int taken;
    int away_from; /* a core; -1: none */
} Seat;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t called;
    Job *_Atomic newest;       /* of the copies that are going on */
    _Atomic int64_t expected;  /* until when another is: who is awake stays so */
    int alive, busy, asleep;
    Seat seats[MOST_CREW];
} crew = {.lock = PTHREAD_MUTEX_INITIALIZER, .called = PTHREAD_COND_INITIALIZER};

/* In a forked child, where none of them are. */
static void
forget_crew(void)
{
    crew.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    crew.called = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    atomic_store(&crew.newest, NULL);
    crew.alive = crew.busy = crew.asleep = 0;
    memset(crew.seats, 0, sizeof crew.seats);
}

int
add_copying(void)
{
    static int watched;
    if (!watched && pthread_atfork(NULL, NULL, forget_crew) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    watched = 1;
    return 0;
}

/* A copy of which nobody has taken the last slice; with the lock. */
static Job *
open_job(void)
{
    Job *job = atomic_load(&crew.newest);
    while (job != NULL && atomic_load(&job->next) >= job->nbytes)
        job = job->older;
    return job;
}

/* Whether a copy may have come that was expected; with the lock, but for meanwhile. */
static int
await_expected(void)
{
    if (nanoseconds() >= atomic_load(&crew.expected))
        return 0;
    pthread_mutex_unlock(&crew.lock);
    while (atomic_load(&crew.newest) == NULL && nanoseconds() < atomic_load(&crew.expected))
        for (int n = 0; n < 20; n++)
            relax();
    pthread_mutex_lock(&crew.lock);
    return 1;
}

/* Whether it was called, and not left alone for long; with the lock. */
static int
sleep_until_called(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += IDLE_SECONDS;
    crew.asleep++;
    int failed = pthread_cond_timedwait(&crew.called, &crew.lock, &until);
    crew.asleep--;
    return !failed;
}

static void *
help(void *given)
{
    Seat *seat = given;
    pthread_setname_np(pthread_self(), "mq-copy");
    pthread_mutex_lock(&crew.lock);
    seat->tid = (pid_t)syscall(SYS_gettid);
    do {
        Job *job;
        while ((job = open_job()) != NULL) {
            atomic_fetch_add(&job->users, 1);
            atomic_store(&crew.expected, 0); /* that was it */
            crew.busy++;
            pthread_mutex_unlock(&crew.lock);
            copy_slices(job);
            leave(job);
            pthread_mutex_lock(&crew.lock);
            crew.busy--;
        }
    } while (await_expected() || sleep_until_called());
    seat->taken = 0;
    crew.alive--;
    pthread_mutex_unlock(&crew.lock);
    return NULL;
}

/* How many are to help with so many bytes; with the cores that this thread may use. */
static int
helpers(size_t nbytes, cpu_set_t *set)
{
    size_t wanted = nbytes / (4 * SLICE);
    if (!wanted || sched_getaffinity(0, sizeof *set, set) != 0)
        return 0;
    int most = CPU_COUNT(set) - 1 < MOST_HELPERS ? CPU_COUNT(set) - 1 : MOST_HELPERS;
    return wanted < (size_t)most ? (int)wanted : most;
}

/* Starts a thread; with the lock. */
static int
hire(Seat *seat, const cpu_set_t *others)
{
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0)
        return -1;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 128 * 1024);
    pthread_attr_setaffinity_np(&attributes, sizeof *others, others);
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads that the application knows, */
    sigdelset(&all, SIGSEGV); /* but for those of a thread itself */
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    seat->tid = 0;
    int failed = pthread_create(&thread, &attributes, help, seat);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failed)
        return -1;
    seat->taken = 1;
    crew.alive++;
    return 0;
}

/* Wakes so many who have nothing to do, on other cores than this thread's; with the lock.
   The system may know no better than to wake a thread on the core that it last ran on,
   though others are idle, and there it would only take turns with who called it. */
static void
call(int count, cpu_set_t *set)
{
    int own = sched_getcpu(), most = CPU_COUNT(set) - 1;
    if (own >= 0)
        CPU_CLR(own, set);
    for (int n = 0; n < MOST_CREW; n++) {
        Seat *seat = &crew.seats[n];
        int is_new = !seat->taken;
        if (is_new && (crew.alive - crew.busy >= count || crew.alive >= most))
            continue;
        if (is_new && hire(seat, set) < 0)
            break;
        if (!is_new && seat->tid && seat->away_from != own)
            sched_setaffinity(seat->tid, sizeof *set, set);
        seat->away_from = own;
    }
    for (int n = crew.asleep < count ? crew.asleep : count; n > 0; n--)
        pthread_cond_signal(&crew.called);
}

PyObject *
expect_copy(PyObject *module, PyObject *size)
{
    size_t nbytes = PyLong_AsSize_t(size);
    if (PyErr_Occurred())
        return NULL;
    cpu_set_t set;
    int count = helpers(nbytes, &set);
    if (count && pthread_mutex_trylock(&crew.lock) == 0) {
        atomic_store(&crew.expected, nanoseconds() + EXPECTED_NS);
        call(count, &set);
        pthread_mutex_unlock(&crew.lock);
    }
    Py_RETURN_NONE;
}

static void
copy_together(char *target, const char *source, size_t nbytes, int streams)
{
    cpu_set_t set;
    int count = helpers(nbytes, &set);
    Job *job = count ? malloc(sizeof *job) : NULL;
    if (job == NULL) {
        copy_part(target, source, nbytes, streams);
        return;
    }
    job->target = target;
    job->source = source;
    job->nbytes = nbytes;
    job->streams = streams;
    atomic_init(&job->next, 0);
    atomic_init(&job->left, nbytes);
    atomic_init(&job->users, 1);
    pthread_mutex_lock(&crew.lock);
    job->older = atomic_load(&crew.newest);
    atomic_store(&crew.newest, job);
    call(count, &set);
    pthread_mutex_unlock(&crew.lock);
    copy_slices(job);
    pthread_mutex_lock(&crew.lock);
    Job *newer = atomic_load(&crew.newest);
    if (newer == job) {
        atomic_store(&crew.newest, job->older);
    } else {
        while (newer->older != job)
            newer = newer->older;
        newer->older = job->older;
    }
    pthread_mutex_unlock(&crew.lock);
    while (atomic_load(&job->left) > 0)
        sched_yield(); /* for one slice at most */
    leave(job);
}

PyObject *
copy(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer source, target;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "copy(source, target, past_cache)");
        return NULL;
    }
    int streams = PyObject_IsTrue(args[2]);
    if (streams < 0)
        return NULL;
    if (PyObject_GetBuffer(args[0], &source, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[1], &target, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&source);
        return NULL;
    }
    int fits = source.len == target.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        copy_together(target.buf, source.buf, source.len, streams);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_Format(PyExc_ValueError, "%zd bytes do not fit into %zd", source.len,
                     target.len);
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    if (!fits)
        return NULL;
    Py_RETURN_NONE;
}

/* -- copies of what others are still writing ---------- */

#define FILL_SLICE ((size_t)128 * 1024)
#define FOLLOW_NS 200000
#define MOST_FOLLOW_NS 5000000 /* however little comes at a time */

/* How much of the target is there, in shared memory: by whoever reads on. */
static inline _Atomic uint64_t *
counter_of(const Py_buffer *view)
{
    if (view->len != 8 || (uintptr_t)view->buf % 8) {
        PyErr_SetString(PyExc_ValueError, "a counter has 8 aligned bytes");
        return NULL;
    }
    return (_Atomic uint64_t *)view->buf;
}

/* Hold what a piece is of, and see where it starts; -1 with an exception. */
static int
hold_piece(PyObject *piece, size_t *start, Py_buffer *held)
{
    PyObject *number, *source;
    if (piece != NULL && !PyTuple_Check(piece))
        PyErr_SetString(PyExc_TypeError, "a piece is (start, bytes)");
    if (PyErr_Occurred() || !PyArg_ParseTuple(piece, "OO", &number, &source))
        return -1;
    *start = PyLong_AsSize_t(number);
    if (PyErr_Occurred())
        return -1;
    return PyObject_GetBuffer(source, held, PyBUF_SIMPLE);
}

PyObject *
fill(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "fill(pieces, target, counter)");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(args[0]), held = 0;
    Py_buffer *pieces = PyMem_Calloc(count + 2, sizeof *pieces);
    size_t *starts = PyMem_Calloc(count + 1, sizeof *starts);
    PyObject *done = NULL;
    if (pieces == NULL || starts == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (int n = 0; n < 2; n++, held++)
        if (PyObject_GetBuffer(args[1 + n], &pieces[n], PyBUF_WRITABLE) < 0)
            goto end;
    Py_buffer *target = &pieces[0];
    _Atomic uint64_t *counter = counter_of(&pieces[1]);
    if (counter == NULL)
        goto end;
    for (Py_ssize_t n = 0; n < count; n++, held++) {
        /* By a reference of its own: a source may change the list while it is asked. */
        PyObject *piece = Py_XNewRef(PyList_GetItem(args[0], n));
        int failed = hold_piece(piece, &starts[n], &pieces[2 + n]);
        Py_XDECREF(piece);
        if (failed)
            goto end;
        size_t nbytes = pieces[2 + n].len, total = target->len;
        if (nbytes > total || starts[n] > total - nbytes) {
            held++;
            PyErr_SetString(PyExc_ValueError, "a piece beyond the target");
            goto end;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    /* It goes on where it was: who was told of bytes may have taken them already. */
    uint64_t filled = atomic_load_explicit(counter, memory_order_relaxed);
    for (Py_ssize_t n = 0; n < count; n++) {
        const char *source = pieces[2 + n].buf;
        size_t nbytes = pieces[2 + n].len;
        for (size_t at = 0; at < nbytes; at += FILL_SLICE) {
            size_t size = nbytes - at < FILL_SLICE ? nbytes - at : FILL_SLICE;
            uint64_t stop = starts[n] + at + size;
            if (stop <= filled)
                continue;
            memcpy((char *)target->buf + starts[n] + at, source + at, size);
            if (size == FILL_SLICE)
                atomic_store_explicit(counter, stop, memory_order_release);
        }
    }
    atomic_store_explicit(counter, target->len, memory_order_release);
    Py_END_ALLOW_THREADS
    done = Py_NewRef(Py_None);
end:
    while (held-- > 0)
        PyBuffer_Release(&pieces[held]);
    PyMem_Free(pieces);
    PyMem_Free(starts);
    return done;
}

/* How many bytes beyond `done` are there; 0 if there are none for a while. */
static size_t
wait_for_more(_Atomic uint64_t *counter, size_t done, size_t stop)
{
    int64_t until = 0;
    for (int n = 0;; n++) {
        uint64_t filled = atomic_load_explicit(counter, memory_order_acquire);
        if (filled > done)
            return (filled < stop ? filled : stop) - done;
        if (n < 64)
            continue;
        int64_t now = nanoseconds();
        if (until == 0)
            until = now + FOLLOW_NS;
        else if (now >= until)
            return 0;
        sched_yield();
    }
}

PyObject *
follow(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "follow(source, counter, done, stop, target)");
        return NULL;
    }
    size_t done = PyLong_AsSize_t(args[2]);
    size_t stop = PyErr_Occurred() ? 0 : PyLong_AsSize_t(args[3]);
    if (PyErr_Occurred())
        return NULL;
    Py_buffer source, watched, target;
    if (PyObject_GetBuffer(args[0], &source, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[1], &watched, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&source);
        return NULL;
    }
    if (PyObject_GetBuffer(args[4], &target, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&watched);
        PyBuffer_Release(&source);
        return NULL;
    }
    PyObject *found = NULL;
    _Atomic uint64_t *counter = counter_of(&watched);
    if (counter == NULL)
        goto end;
    if (done > stop || stop > (size_t)source.len || target.len != source.len) {
        PyErr_SetString(PyExc_ValueError, "beyond the source, or not of its size");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    int64_t until = nanoseconds() + MOST_FOLLOW_NS;
    size_t more;
    while (done < stop && (more = wait_for_more(counter, done, stop)) > 0) {
        memcpy((char *)target.buf + done, (const char *)source.buf + done, more);
        done += more;
        if (nanoseconds() >= until)
            break;
    }
    Py_END_ALLOW_THREADS
    found = PyLong_FromSize_t(done);
end:
    PyBuffer_Release(&target);
    PyBuffer_Release(&watched);
    PyBuffer_Release(&source);
    return found;
}
